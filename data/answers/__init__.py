"""Answers of the target to a data set's prompts, by our engine or by an endpoint.

chats.py     state of a chat that is being answered
engine.py    answers by our engine, with a drafter
endpoint.py  answers by an endpoint
files.py     the job: every process answers its share of the prompts into a part; resumed, merged
client.py    HTTP client for OpenAI-compatible endpoints, whose replies are untrusted
"""
