"""Records of many shapes to tokens and loss masks.

files.py       files, packed or not, to raw records
sources.py     files, folders, globs and Hub data sets by name; held-out records; mixtures; provenance
exact.py       records that give their tokens, and servers' logs of them
records.py     raw records of many shapes, published prompt sets among them, to chats or plain texts
filters.py     removal of duplicates and of the evaluation's text, with counts
template.py    chat templates: rendering, tags, the tokens that end a turn
masks.py       a document's tokens and loss mask; the spans of a chat's answers; reasoning, kept or cut
prompts.py     records to samples and to prompts
cache.py       tokenised samples on disk: written once, mapped by all processes
"""
