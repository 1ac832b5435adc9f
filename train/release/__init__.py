"""Publishing a trained head: folder, card, upload, verification.

card.py    the model card of a published head: the values of README.jinja, which has the sentences
config.py  the types of conf/publish.yaml
folder.py  the folder that is published, its head exported if a format is given
hub.py     upload of a folder to the Hub in one commit; its verification, by download and by what the head accepts
"""
