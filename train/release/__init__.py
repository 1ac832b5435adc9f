"""A trained head to the Hub: folder, card, verification, and the doctor.

card/         the model card of a published head: what it is, what was measured, where it comes from, how to serve
              it, its limits
doctor/       the doctor: whether a head on disk or on the Hub will draft for its target, in which engine, and
              what to mend
config.py     the type of conf/publish.yaml
folder.py     the folder that is published
hub.py        a folder to the Hub in one commit, and back
trial.py      what the head accepts, before and after
exporting.py  a head in a foreign format
"""
