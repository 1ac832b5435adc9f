"""Answers of the target to a data set's prompts, by our engine or by an endpoint.

chats.py     the state of a chat that is being answered
engine.py    answers by our engine, with a drafter
files.py     the job: each process writes the answers to its share of the prompts; resuming and merging
client.py    HTTP client for OpenAI-compatible endpoints, whose replies are untrusted; answers by an endpoint
"""
