"""Inputs of an evaluation: workloads, recorded texts, runs, drafters.

workloads.py  prompts to measure on, and answers by the target or from a log
drafters.py   the head and the target of a run's folder; a configuration's drafters
"""
