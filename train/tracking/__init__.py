"""Where a run's numbers go: metrics.jsonl, wandb, TensorBoard, the progress bar, the table of a sweep.

flops.py     floating-point operations, counted
sweep.py     the runs of a multirun: one table, and the τ that is searched
track.py     what becomes of a run's numbers: trackers, progress bar
trackers.py  metrics.jsonl, wandb, TensorBoard
clock.py     where a step's time goes
"""
