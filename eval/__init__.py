"""Evaluation: acceptance, speed and the losslessness gate of draft heads, as one report."""
