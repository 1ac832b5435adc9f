"""The ground floor: metrics, rows of results, statistics, losslessness, the cost model.

cost_model.py    the speed that costs and acceptance predict, in batches of any size
losslessness.py  the gate: the same tokens as the baseline; the chi-square test of sampled ones
metrics.py       acceptance and speed from recorded generations
counters.py      served engines' counts of their drafts, in our terms
machine.py       a measurement's environment: device, versions, revision
results.py       a row of the report, the settings it was measured under, and how it is built from requests
serving.py       what vLLM reads of a measurement: how many tokens to draft by batch size
"""
