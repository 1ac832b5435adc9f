"""Acceptance, speed and losslessness of draft sources.

inputs/          what is measured on what: workloads, recorded texts, runs, draft sources
live/            the live tier: draft sources timed beside their baselines
measures/        the ground floor: metrics, rows of results, statistics, losslessness, the cost model
offline/         the tiers without a clock: acceptance along given text
report/          the report: JSON, Markdown, terminal; read back and put side by side
tuning/          which tree is fastest on this device
gates.py         all gates of an evaluation
tune.py          the best tree for a head at every batch size: predicted, measured, written
tiers.py         the tiers without a clock: which texts, which sources
sessions.py      the live tier: every workload, temperature, batch size and rate; what is left out to end in time
config.py        the types of conf/eval.yaml
search_skips.py  the command that searches sub-layers to skip
setup.py         target, dtype, workloads and folder of an evaluation
conditions.py    the conditions that its numbers hold under
run.py           the command: gate, live, along texts, report
"""
