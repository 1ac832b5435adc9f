"""EAGLE-4 (eagle-hq/EAGLE-4, October 2026): EAGLE-3.1 with a sliding window and a low-rank candidate lm_head.

The window is the head's `length`. The candidates are an option of every head with one lm_head (`CandidateLmHead` in
heads/modules/vocab.py): a second stage of training, which starts from any EAGLE-3 or EAGLE-4 head.

Unsupported: layers with a mixture of experts, and the authors' append-only cache of the keys and values of
drafted rows; our cache holds those of verified rows, as in EAGLE-3. Their code is for inference only and was not run.
"""

from heads.eagle3 import Eagle3


class Eagle4(Eagle3):
    """The EAGLE-4 head."""
