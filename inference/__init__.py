"""The decoding engine: draft, verify with the frozen target, commit.

drafters/         drafters, one a file, and the policies by which a tree grows
target/           the frozen target: loading, placement, cache, forward passes, and the proof that they are what
                  the engine needs
verification/     trees, verification rules, sampling and random numbers: pure functions of tensors
chat_template.py  the target's chat template, rendered under limits: it is a program from outside
limits.py         what fits into the target's context
request.py        a request: its settings, text, limits, stops and result
phase_timer.py    seconds by part, without waiting for a device
step.py           a step of a batch: draft, verify, commit, with one read by the host
graphs.py         how its stages run: as they are, compiled, or captured in CUDA graphs
service.py        the drafter in service: swapped while requests run; the old one returns if it accepted more
batch.py          sequences that enter and leave one by one
decode.py         speculate() and autoregress(), one engine
text_stream.py    tokens to text as they come
api.py            load() and generate(), which the package headstart has
run.py            the command: generate or chat, printed while it is made in the colour of who wrote each token
protocol.py       what a drafter is: the protocol and its records
tree_config.py    the configuration of a tree policy, and which one is drafted by how many sequences
"""
