"""The live tier: draft sources timed beside their baselines.

sampled.py       the losslessness check above temperature 0: coupled tokens, and sampled ones against the target's probs
interleaved.py   the clock: every drafter on the same prompts, interleaved
request_rate.py  the same when requests come at a rate: the queue, latencies from the arrival
hf.py            HF's generate, the second baseline
extras.py        training curves, and acceptance of every tree node
answers.py       sample answers: the source and the probabilities of each token
"""
