"""Acceptance, speed and losslessness of drafters.

inputs/          workloads, recorded answers, runs, drafters
live/            the live tier: drafters timed together with their baselines
measures/        metrics, result rows, statistics, losslessness, the cost model
report/          the report: JSON, Markdown, terminal, page; comparison of reports
tuning/          the fastest tree on this device
gates.py         all losslessness checks of an evaluation: greedy, sampled and timed tokens
tune.py          the best tree for a head at every batch size: predicted, measured, written
teacher_forced.py  the teacher-forced tier: acceptance of a head and of replayed trees along given text
sessions.py      the rows of both tiers: every workload, temperature, batch size and rate
config.py        the types of conf/eval.yaml
search_skips.py  the command that searches sub-layers to skip
setup.py         target, dtype, workloads and folder of an evaluation; the conditions of its numbers
run.py           the command: gate, live tier, teacher-forced tier, report
"""
