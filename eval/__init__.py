"""Acceptance, speed and losslessness of drafters.

inputs/          workloads, recorded answers, runs, drafters
measures/        metrics, result rows, statistics, losslessness
report/          the report: JSON, Markdown, terminal, page
gates.py         the losslessness checks of an evaluation: greedy and sampled tokens
live.py          the live tier: drafters timed together with their baselines, in turns or under load
extras.py        training curves, trees and answers for a report
teacher_forced.py  the teacher-forced tier: acceptance of a head and of replayed trees along given text
tune.py          the best tree for a head at every batch size: predicted, measured, written
config.py        the types of conf/eval.yaml
search_skips.py  the command that searches sub-layers to skip
setup.py         target, dtype, workloads and folder of an evaluation; the conditions of its numbers
run.py           the command: losslessness check, live tier, teacher-forced tier, report
"""
