"""What every layer uses: typed configurations, one-line errors, redaction of secrets, parsing of untrusted files.

files.py          folders replaced whole or not at all
ranges.py         ranges of numbers in configurations, stated beside their types
typed.py          the one border between YAML or JSON and dataclasses
resolvers.py      what values in conf/ may compute, as ${root:…} and ${by_device:…}
command.py        what every command begins with: Hydra, without the secrets of the command line
target_config.py  a target's configuration, looked at before it is believed
context.py        how many positions a target has, and how long rows may be for it
errors.py         an error as one line for its user
redact.py         secrets out of what is written or printed
untrusted.py      what comes from outside is data: parsed, naming no code, no way out of its folder
"""
