"""The decoding engine: draft, verify with the frozen target, commit.

drafters/        drafters, one per file, and tree policies
target/          the frozen target: loading, placement, cache, forward passes, and the checks of all these
verification/    trees, verification rules, sampling and random numbers: pure functions of tensors
protocol.py      the protocol of drafters and its records
request.py       a request: its parameters, text, limits, stops and result; the timer of a step's phases
step.py          one decoding step for a batch: draft, verify, accept, commit, with one read by the host
batch.py         continuous batching, and a drafter that may be swapped while requests run
decode.py        speculate() and autoregress(): speculative and autoregressive decoding
api.py           load() and generate(), the Python API of the package headstart
run.py           the command: generate or chat, streamed, with drafted tokens in another colour
"""
