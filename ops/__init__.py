"""Commands about a server or about many runs; they may import every package, and none imports them.

budget.py    the command that trains the fastest head within a budget
curve.py     the learning curve of τ, and its interval
loop.py      the command that maintains a head in service by its log
proof.py     the comparison of an adapted head with the head in service
commands.py  starting the other commands as processes
audits/      the audit of a served model: losslessness and speedup
served.py    client of served models: questions, streamed replies with their times, counters
audit.py     the command of the audit
endpoint.py  the command that measures a served model
watch.py     the command that raises an alarm when acceptance has fallen
sequential.py  the sequential test of a watch
examine/    the doctor's inputs and findings
doctor.py   the command that examines a published head
"""
