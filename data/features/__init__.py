"""The target's hidden states: live, from a store on disk, or from a serving engine.

source.py         the protocol of feature sources; live features; features from a store, prefetched
store.py          a store of features on disk: dtypes, shards, index, checksums, conversion
extraction.py     extraction of all sequences into a store, shard after shard
served.py         features from the files that vLLM servers write, prefetched
"""
