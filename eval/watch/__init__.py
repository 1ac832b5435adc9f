"""Acceptance of a head in service, watched: one line when it is time to adapt the head.

sequential.py  the test: betting against a mean that has not fallen, for several means at once, valid at any time
arrivals.py    observations in order of arrival: a log that grows, or a server's counters
run.py         the watch, from the first observation to its line and exit status
"""
