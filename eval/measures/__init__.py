"""Metrics, result rows, statistics and losslessness.

losslessness.py  the gate: the same tokens as the baseline; the chi-square test of sampled ones
metrics.py       acceptance and speed from recorded generations
counters.py      served engines' counts of their drafts, in our terms
machine.py       a measurement's environment: device, versions, revision
results.py       a row of the report, the settings it was measured under, and how it is built from requests
"""
