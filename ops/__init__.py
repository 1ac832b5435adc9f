"""Commands about a server or about many runs. They import every package below, and no package imports them.

examine/    what the doctor reads and finds
doctor.py   the command that examines a published head
replace.py  the command that gives a running server another head
"""
