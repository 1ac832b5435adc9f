"""Publishing a trained head: folder, card, verification, and the doctor.

card/          the model card of a published head: description, measurements, provenance, serving, limits
doctor/        the doctor: checks whether a head on disk or on the Hub will draft for its target, in which engine,
               and what to fix
checkpoint.py  a copy of the target's checkpoint with the head as its own MTP module
config.py      the types of conf/publish.yaml
folder.py      the folder that is published, its head exported if a format is given
serve.py       a running server's head replaced by restart; the old one returns if it accepted more
hub.py         upload of a folder to the Hub in one commit, and its verification
trial.py       comparison of what the head accepts before and after
"""
