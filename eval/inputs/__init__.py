"""Inputs of an evaluation: workloads, recorded texts, runs, draft sources.

workloads.py  prompts to measure on
texts.py      what the target writes after them, or a log has recorded
runs.py       the head and the target of a run's folder
drafters.py   a configuration's draft sources; cold clones of those that remember
"""
