"""The target's hidden states: live, from a store on disk, or from a serving engine.

source.py         the protocol of feature sources; live features, and those of a store, read ahead of training
store.py          a store of features on disk: dtypes, shards, index, checksums, conversion
extraction.py     extraction of all sequences into a store, shard after shard
served.py         features from vLLM servers and the files that these write, asked for ahead of training
"""
