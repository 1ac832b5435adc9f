"""Served models measured as draft sources are.

measure.py   measurement of served endpoints, like that of local drafters
client.py    client of a served model: requests, streamed answers, counters
counters.py  vLLM's and SGLang's counts of their drafts, in our terms
rows.py      results of served answers, and the losslessness check of their texts
"""
