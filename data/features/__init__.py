"""The target's hidden states: live, from a store on disk, or from a serving engine.

source.py         the protocol of feature sources, and live features
store.py          a store of features on disk: dtypes, shards, index, checksums
coding.py         conversion between features and a store's tensors
extraction.py     extraction of all sequences into a store, shard after shard
vllm_features.py  files of hidden states that vLLM writes
served.py         features from vLLM servers, asked for ahead of training
stored.py         features from a store, read ahead of training
"""
