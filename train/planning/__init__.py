"""Checks and a cost estimate of a run before anything is loaded.

check.py         checks of a run by its configuration, the file system and the target's configuration
resolve.py       the run of a composed configuration: what was left open is filled in once
plan.py          the plan of plan=true: its device, memory, disk, operations, hours
memory.py        memory of a process for head and target, by strategy and placement
head.py          memory and operations of a head's micro-batch, in closed form
shapes.py        a target's shape from its configuration alone
table.py         a plan as tables for the terminal, with overrides that make the run fit
"""
