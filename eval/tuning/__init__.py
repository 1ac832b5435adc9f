"""Search for the fastest tree on this device.

costs.py  the measured costs of a decoding step's parts
grid.py   the trees that the tuner tries, simulated along recorded text; static trees by Sequoia's algorithm
"""
