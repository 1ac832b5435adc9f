"""Tracking of a run's numbers: metrics.jsonl, wandb, TensorBoard, the progress bar, the table of a sweep.

flops.py     counting of floating-point operations
sweep.py     the runs of a multirun: one table, and the τ that is searched
trackers.py  metrics.jsonl, wandb, TensorBoard and the progress bar, and the dispatch of records to them
"""
