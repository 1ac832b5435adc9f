"""Checks and a cost estimate of a run before anything is loaded.

check.py         checks of a run by its configuration, the file system and the target's configuration
resolve.py       the resolved run of a composed configuration
plan.py          the plan of plan=true: memory, disk, operations, hours, and overrides that make the run fit
shapes.py        a target's shape, and a head's memory and operations, in closed form
"""
