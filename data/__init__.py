"""From text to features: records, tokens and loss masks, packed batches, live features, the target's own answers."""
