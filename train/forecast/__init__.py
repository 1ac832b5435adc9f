"""The forecast of a training within a budget: which head, and for how long.

log.py         what a log holds, and how sure the target is along it
acceptance.py  what a head is worth on prompts, one by one
curve.py       the fit of learning curves, and samples of what they forecast
pilots.py      short trainings of candidates, the choice among them, and what a run goes on from
text.py        what is printed: the plan, the table, the decision, and the outcome
command.py     a training within a budget from its log to its outcome
"""
