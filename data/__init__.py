"""From text to features.

answers/       the target's answers to prompts, by our engine or by an endpoint
features/      the target's hidden states: live, or from a store on disk
text/          records of many shapes to tokens and loss masks
config.py      which documents to train on
batches.py     packing, order, and the processes' micro-batches
run.py         the command: write answers, show a loss mask, extract features
"""
