"""The audit of a served model over HTTP: losslessness and speedup of its speculative decoding.

compare.py     requests within a budget; greedy answers compared with the baseline's, near ties separated from faults
checks.py      checks of greedy answers, and of a reply's properties
sampling.py    two-sample tests above temperature 0: samples, seeds, and several choices of one request
*.j2           templates of the page, the terminal's lines and a reproduction; words.j2 names checks and faults
"""
