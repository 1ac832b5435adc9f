"""The tiers without a clock: acceptance along given text.

teacher_forced.py  acceptance of a head along given text, under any tree
replay.py          a log played back to sources that read text alone
"""
