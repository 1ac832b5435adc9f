"""The target's hidden states: live, or from a store on disk.

source.py         where features come from, and live
quantize.py       hidden states in fewer bits
store.py          a store of features on disk: shards, index, checksums
store_files.py    files written whole, and by one process at a time
coding.py         between features and what a store keeps of a row
extract.py        all rows into a store: the estimate, then shard after shard
extraction.py     the same from a configuration
vllm_features.py  hidden states that vLLM wrote
stored.py         features from a store, read ahead of training
writer.py         what a hybrid run computes goes into the store
"""
