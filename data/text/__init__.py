"""Records of many shapes to tokens and loss masks.

files.py       files, packed or not, to raw records
sources.py     files, folders, globs and Hub data sets by name; held-out records; mixtures
records.py     raw records of many shapes to chats or plain texts
benchmarks.py  records of published prompt sets
filters.py     removal of duplicates and of the evaluation's text, with counts
template.py    chat templates: rendering, tags, the tokens that end a turn
turns.py       the spans of a chat's answers in its text
reasoning.py   the reasoning before an answer, kept or cut
masks.py       a document's tokens and loss mask
prompts.py     records to samples and to prompts
provenance.py  provenance of a run's text: its sources, and who wrote the answers
cache.py       tokenised samples on disk: written once, mapped by all processes
"""
