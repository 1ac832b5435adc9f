"""Checks and a cost estimate of a run before anything is loaded.

check.py   checks of a run by its configuration, the file system and the target's configuration
plan.py    the plan of plan=true: memory, disk, operations, hours
memory.py  memory of a process for head and target, by strategy and placement
trace.py   memory and operations of a head's micro-batch, traced on fake tensors
shapes.py  a target's shape from its configuration alone
device.py  the device that a plan is made for
advice.py  overrides that make a run fit
table.py   a plan as a table for the terminal
"""
