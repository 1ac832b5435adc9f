"""The processes of a run: launching, checking, watching, sharding strategies.

strategy.py   strategies: DDP, FSDP2, ZeRO-2 and ZeRO-3; gathering and scattering a sharded tensor
launch.py     launching the processes of launcher=…, here or as a SLURM job; detection of other launchers
processes.py  the Accelerator, a lock on the output folder, control messages: stop requests, failures, gathered values
"""
