"""The live tier: draft sources timed beside their baselines.

sampled.py       the losslessness check above temperature 0: coupled tokens, and sampled ones against the target's probs
interleaved.py   the clock: every drafter and HF's generate on the same prompts, interleaved
request_rate.py  the same when requests come at a rate: the queue, latencies from the arrival
extras.py        training curves, acceptance of every tree node, sample answers
"""
