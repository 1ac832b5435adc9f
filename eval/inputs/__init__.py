"""Inputs of an evaluation: workloads, recorded texts, runs, drafters.

workloads.py  prompts to measure on, and what the target writes after them or a log has recorded
drafters.py   the head and the target of a run's folder; a configuration's drafters
"""
