"""Search for the fastest tree on this device.

static_tree.py  the static tree with the highest acceptance: Sequoia's dynamic programme
costs.py        the measured costs of a decoding step's parts
grid.py         the trees that the tuner tries, simulated along recorded text
results.py      the tuner's results: tune.json, the tables
"""
