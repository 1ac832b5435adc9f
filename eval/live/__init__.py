"""The live tier: draft sources timed beside their baselines.

sampled.py       the gate above temperature 0: coupled tokens, and draws against the target's law
interleaved.py   the clock: every drafter on the same prompts, interleaved
request_rate.py  the same when requests come at a rate: the queue, latencies from the arrival
hf.py            HF's generate, the second baseline
extras.py        what it holds besides: training curves, trees
answers.py       sample answers: who wrote each token, and how probable it was
"""
