"""Records of many shapes to tokens and loss masks.

files.py       files, compressed or not, to raw records
sources.py     files, folders, globs and Hub data sets by name; held-out records; mixtures; provenance
transcripts.py transcripts of agents, exported traces and batches to records; selection of records by fields
parts.py       messages of every SDK, their content in typed parts, to chat messages
streams.py     bodies of requests and replies that logs keep as JSON texts or streams
shapes.py      shapes of logs and data sets to chats
records.py     raw records to chats, plain texts or tokens; published prompt sets
filters.py     removal of duplicates and of evaluation text, with counts
template.py    chat templates: rendering, tags, the tokens that end a turn
masks.py       loss masks: a document's tokens, and the spans of a chat's answers
prompts.py     records to samples and to prompts; samples on disk, written once and mapped by all processes
"""
