"""The live tier: drafters timed together with their baselines.

interleaved.py  timing: every drafter and HF's generate on the same prompts, interleaved, or at a rate of requests
extras.py       training curves, acceptance of every tree node, sample answers
"""
