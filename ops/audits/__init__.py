"""The audit of a served model: is it lossless with speculation, and how much faster is it, asked over HTTP alone.

run.py         an audit from the first request to page, JSON and verdict; speedup by load
ask.py         requests to both servers within a budget, and the questions that they hold
compare.py     greedy answers compared with the baseline's, near ties separated from faults; the faults by name
greedy.py      checks of greedy answers: alone, after other prompts, in conversations, at chunk borders, side by side
properties.py  checks of what a reply must hold by itself: limits, stop strings, counts, logprobs, schemas, tool calls
sampling.py    two-sample tests above temperature 0, and the smallest faults that they reveal
seeds.py       seeds, and several choices of one request
output.py      the page, the terminal's lines, and a reproduction as one script of the standard library
"""
