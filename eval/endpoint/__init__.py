"""Served models measured as draft sources are.

measure.py   measurement of served endpoints, like that of local drafters
client.py    client of a served model: streamed answers with their times, counters
questions.py prompts as requests of OpenAI's API
replies.py   replies of OpenAI-compatible servers: texts, tool calls, logprobs, counts
counters.py  vLLM's and SGLang's counts of their drafts, in our terms
rows.py      results of served answers, and the losslessness check of their texts
"""
