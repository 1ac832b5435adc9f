"""The audit of a served model over HTTP: losslessness and speedup of its speculative decoding.

ask.py         requests to both servers within a budget
compare.py     greedy answers compared with the baseline's, near ties separated from faults
greedy.py      checks of greedy answers: alone, after other prompts, in conversations, at chunk borders, side by side
properties.py  checks of a reply by itself: limits, stop strings, counts, logprobs, schemas, tool calls
sampling.py    two-sample tests above temperature 0: samples, seeds, and several choices of one request
output.py      audit.json, the page, the terminal's lines, and a reproduction as one script of the standard library
*.j2           their templates; words.j2 names checks and faults
"""
