"""The tiers without a clock: acceptance along given text.

teacher_forced.py  acceptance of a head along given text, under any tree
"""
