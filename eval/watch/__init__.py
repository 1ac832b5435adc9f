"""Acceptance of a head in service, watched: when it has fallen.

sequential.py  the test, with a bound on ever being wrong
log.py         what a log that grows says of acceptance, or a head played along it
"""
