"""What a run will cost, and what is wrong with it, before anything is loaded.

check.py   what is known of a run before anything is loaded
plan.py    what plan=true says of a run: memory, disk, operations, hours
memory.py  what a process holds of head and target, by strategy and placement
trace.py   a micro-batch of a head followed without numbers
shapes.py  a target's shape from its configuration alone
device.py  the device that a plan is made for
advice.py  what to change where a run does not fit
table.py   a plan for the terminal
"""
