"""Answers that the target writes, by our engine or by an endpoint.

write.py     let the target write the answers: every process its share, then one file
chats.py     a chat while it is being answered
text.py      what is asked in turn, and what of an answer is kept
engine.py    our engine answers, with a draft source
endpoint.py  an endpoint answers
files.py     answers on disk: parts, resumed and merged
client.py    the client of an OpenAI-compatible endpoint, which trusts no reply
"""
