"""Answers of the target to a data set's prompts, by our engine or by an endpoint.

write.py     the job: every process answers its share of the prompts, then one file is merged
chats.py     state of a chat that is being answered
engine.py    answers by our engine, with a draft source
endpoint.py  answers by an endpoint
files.py     answers on disk: parts, resumed and merged
client.py    HTTP client for OpenAI-compatible endpoints, whose replies are untrusted
"""
