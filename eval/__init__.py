"""Acceptance, speed and losslessness of drafters.

inputs/          what is measured on what: workloads, recorded texts, runs, drafters
live/            the live tier: drafters timed beside their baselines
measures/        the ground floor: metrics, rows of results, statistics, losslessness, the cost model
report/          the report: JSON, Markdown, terminal; read back and put side by side
tuning/          which tree is fastest on this device
gates.py         all losslessness checks of an evaluation: greedy, sampled and timed tokens
tune.py          the best tree for a head at every batch size: predicted, measured, written
teacher_forced.py  a head along given text, without a clock: acceptance, replayed trees
sessions.py      the rows of both tiers: every workload, temperature, batch size and rate; heads along texts
config.py        the types of conf/eval.yaml
search_skips.py  the command that searches sub-layers to skip
setup.py         target, dtype, workloads and folder of an evaluation; the conditions of its numbers
run.py           the command: gate, live, along texts, report
"""
