"""Answers that the target writes, by our engine or by an endpoint.

write.py     the target's answers to all prompts: every process writes some, then one file
chats.py     a chat while it is being answered
text.py      the turns of a chat, and the parsing of an answer's text
engine.py    answers by our engine, with a draft source
endpoint.py  answers by an endpoint
files.py     answers on disk: parts, resumed and merged
client.py    the client of an OpenAI-compatible endpoint, which trusts no reply
"""
