"""Served models measured as draft sources are.

measure.py   served endpoints, measured like local drafters
client.py    a served model as one asks it: requests, streamed answers, counters
counters.py  what vLLM and SGLang count of their drafts, in our terms
rows.py      served answers as rows, and the gate over their texts
"""
