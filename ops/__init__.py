"""Commands about a server or about many runs. They import every package below, and no package imports them.

budget.py    the command that trains the head that is fastest after a budget
curve.py     the learning curve of τ, and its interval
loop.py      the command that maintains a head in service by its log
proof.py     the adapted head next to the head in service, and the verdict
commands.py  starting the other commands as processes
audits/      the audit of a served model: is it lossless, and how much faster
served.py    client of served models: questions, streamed replies with their times, counters
audit.py     the command of the audit
endpoint.py  the command that measures a served model
watch.py     the command that says when acceptance has fallen, by a log or a server's counters
sequential.py  the test of a watch, with a bound on ever being wrong
examine/    what the doctor reads and finds
doctor.py   the command that examines a published head
"""
