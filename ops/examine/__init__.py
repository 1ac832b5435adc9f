"""The doctor's inputs, a head and its target, and its findings.

files.py       the head's files, from disk or the Hub, and the target as far as it loads
finding.py     the findings, for the terminal
keys.py        the keys and tensors that engines read, and the records of the training
"""
