"""Every value of every command: one primary YAML per run.py, and the groups it composes. The types are in Python."""
