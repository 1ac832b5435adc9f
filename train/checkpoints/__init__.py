"""Checkpoints: what is kept, when it is written, how a run resumes.

state.py   what a run must keep to go on, as named whole tensors
format.py  checkpoints on disk: shards, index, checksums, whole or not at all
saver.py   checkpoints written beside the training, and the newest good one found
resume.py  what a run must go on with
"""
