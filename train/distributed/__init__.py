"""Processes: launched, watched, sharing one head.

strategy.py   how processes share the head: copies, FSDP2, ZeRO-2 and ZeRO-3
shards.py     what one process holds of a tensor that is cut up, and the whole of it
lock.py       one run at a time in an output folder
control.py    what processes tell each other: to stop, what failed
heartbeat.py  signs of life, by which a lost process is named
launch.py     the processes that launcher=… asks for, here or as a job of SLURM
processes.py  what was started against what was asked for
"""
