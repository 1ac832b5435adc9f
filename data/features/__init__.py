"""The target's hidden states: live, or from a store on disk.

source.py         sources of features, and live ones
quantize.py       quantisation of hidden states
store.py          a store of features on disk: shards, index, checksums
coding.py         conversion between features and the tensors of a store's row
extraction.py     extraction of all rows into a store: the estimate, then shard after shard
vllm_features.py  hidden states that vLLM wrote
stored.py         features from a store, read ahead of training; writing what a hybrid run computes
"""
