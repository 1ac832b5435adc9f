"""A head in service from its log: watch, adapt, prove, swap.

state.py    the folder of it all: the stage, every decision with its evidence
traffic.py  the log's records: what is wrong with them, and which part each is for
prove.py    the adapted head beside the head in service, and the verdict
stages.py   the stages in turn, each resumed where it was stopped
"""
