"""The audit of a served model: is it lossless with speculation, and how much faster is it, asked over HTTP alone.

run.py          an audit from the first request to page, JSON and verdict
ask.py          requests to both servers within a budget, and the questions that they hold
compare.py      greedy answers compared with the baseline's, near ties separated from faults
greedy.py       checks of greedy answers: alone, after other prompts, in conversations, at chunk borders, side by side
properties.py   checks of what a reply must hold by itself: limits, stop strings, counts, logprobs, schemas
calls.py        tool calls: whole, and the baseline's
sampling.py     two-sample tests above temperature 0, and the smallest faults that they reveal
seeds.py        seeds, and several choices of one request
speed.py        speedup by load, throughput against speed of one user, acceptance by position
faults.py       faults by name, with public incidents, and which one a difference looks like
reproduction.py a minimal reproduction as one script of the standard library
view.py         the page and the terminal's lines
"""
