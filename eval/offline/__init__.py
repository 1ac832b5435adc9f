"""The tiers without a clock: acceptance along given text.

teacher_forced.py  a head along given text: what any tree would have accepted
replay.py          a log played back to sources that read text alone
"""
