"""Checkpoints: content, format on disk, asynchronous saving, resuming.

state.py   a run's state as named whole tensors: weights, optimiser, average
format.py  checkpoints on disk: shards, index, checksums, atomic commits
saver.py   saving in a thread while training continues, and the search for the newest good checkpoint
resume.py  the settings that must not change on resume, and restoring
"""
