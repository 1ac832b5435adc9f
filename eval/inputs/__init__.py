"""What is measured on what: workloads, recorded texts, runs, draft sources.

workloads.py  prompts to measure on
texts.py      what the target writes after them, or a log has recorded
runs.py       what a run's folder says
drafters.py   a configuration's draft sources
states.py     sources that remember, warm and cold; a depth that all keep
"""
