"""Commands about a server or about many runs. They import every package below, and no package imports them.

audits/      the audit of a served model: is it lossless, and how much faster
served/      served models measured as draft sources are
audit.py     the command of the audit
endpoint.py  the command that measures a served model
watch.py     the command that says when acceptance has fallen
"""
