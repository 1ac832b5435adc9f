"""Metrics, result rows, statistics and losslessness.

losslessness.py  the losslessness check: the baseline's tokens; the chi-square test of sampled tokens
metrics.py       acceptance and speed from recorded generations
counters.py      engines' counters of their drafts, in our definitions
machine.py       a measurement's environment: device, versions, revision
results.py       a row of the report, the settings it was measured under, and how it is built from requests
"""
