"""Served models measured as draft sources are.

client.py       client of a served model: streamed answers with their times, counters
exchange.py     requests and replies of OpenAI's API: prompts, texts, tool calls, logprobs, counts
measurement.py  measurement of served endpoints, like that of local drafters: rows of the report, and their texts' check
"""
