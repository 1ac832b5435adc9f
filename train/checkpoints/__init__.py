"""Checkpoints: content, format on disk, asynchronous saving, resuming.

format.py  checkpoints on disk: shards, index, checksums, atomic commits
saver.py   a run's state as named whole tensors; saving it in a thread; the search for the newest good checkpoint
resume.py  the settings that must not change on resume, and restoring
"""
