"""A training within a budget: which head it is spent on, and what that will come to.

curve.py    the fit of a learning curve, with its interval
command.py  short trainings of candidates, the choice among them, and the run that continues from the best one
"""
