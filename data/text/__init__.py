"""Records of many shapes to tokens and loss masks.

files.py       files, packed or not, to raw records
sources.py     files, folders, globs and Hub data sets by name; what is held out; mixtures
records.py     raw records of many shapes to chats or plain texts
benchmarks.py  records of published prompt sets
filters.py     copies and the evaluation's text dropped, and all counted
template.py    chat templates: rendering, tags, the ends of turns
turns.py       where a chat's answers stand in its text
reasoning.py   what is thought before an answer, kept or cut
masks.py       a document's tokens and loss mask
prompts.py     records to samples and to prompts
lineage.py     which text a run was trained on, and who wrote it
cache.py       tokenised samples on disk: made once, mapped by all
"""
