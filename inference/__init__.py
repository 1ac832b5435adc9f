"""The decoding engine: draft, verify with the frozen target, commit.

drafters/        drafters, one a file, and the policies by which a tree grows
target/          the frozen target: loading, placement, cache, forward passes, and the checks of all these
verification/    trees, verification rules, sampling and random numbers: pure functions of tensors
protocol.py      what a drafter is: the protocol and its records
request.py       a request: its settings, text, limits, stops and result; seconds by part
step.py          a step of a batch: draft, verify, commit, with one read by the host
batch.py         sequences that enter and leave one by one, and the drafter in service, which may be swapped meanwhile
decode.py        speculate() and autoregress(), one engine
api.py           load() and generate(), which the package headstart has
run.py           the command: generate or chat, printed while it is made in the colour of who wrote each token
"""
