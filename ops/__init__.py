"""Commands about a server or about many runs. They import every package below, and no package imports them.

budget.py    the command that trains the head that is fastest after a budget
curve.py     the learning curve of τ, and its interval
loop.py      the command that maintains a head in service by its log
state.py     a maintenance's stage and decisions, in one file
traffic.py   the log's records: what is wrong with them, and which part each is for
proof.py     the adapted head next to the head in service, and the verdict
commands.py  starting the other commands as processes
"""
