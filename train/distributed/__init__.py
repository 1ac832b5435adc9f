"""The processes of a run: launching, checking, watching, sharding strategies.

strategy.py   strategies: DDP, FSDP2, ZeRO-2 and ZeRO-3
shards.py     sharded tensors: a process's shard, gathering and scattering the whole
lock.py       a lock on the output folder: one run at a time
control.py    control messages between processes: stop requests, failures
heartbeat.py  heartbeats, by which errors name a lost process
launch.py     launching the processes of launcher=…, here or as a SLURM job
processes.py  the Accelerator, checked against the launcher's settings
"""
