"""Which tree is fastest on this device.

static_tree.py  which static tree accepts most: Sequoia's dynamic programme
costs.py        what the parts of a step cost on this device
grid.py         the trees that the tuner tries
results.py      what that found: tune.json, the tables
simulated.py    every tree that the tuner tries, played along recorded text
"""
