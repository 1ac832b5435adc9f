"""Commands about a server or about many runs; they may import every package, and none imports them.

audits/      the audit of a served model: losslessness and speedup
audit.py     the command of the audit
budget.py    the command that trains the fastest head within a budget, and the learning curve of τ
commands.py  starting the other commands as processes
doctor.py    the command that examines a published head
endpoint.py  the command that measures a served model
examine.py   the inputs and findings of the doctor
loop.py      the command that maintains a head in service from its log
served.py    a client of served models: questions, timed streams of replies, counters
watch.py     the command that raises an alarm when acceptance falls, and its sequential test
"""
