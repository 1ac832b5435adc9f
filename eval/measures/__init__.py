"""The ground floor: metrics, rows of results, statistics, losslessness, the cost model.

cost_model.py    the speed that costs and acceptance predict, in batches of any size
losslessness.py  the gate: the same tokens as plain decoding
chi_square.py    the chi-square test of a law, and how many draws its power asks for
metrics.py       acceptance and speed from recorded generations
machine.py       what a measurement depends on besides the models
results.py       a row of the report, and the session it was measured in
builder.py       the builder of rows: passes and requests, timed or not
written.py       plain values for JSON
"""
