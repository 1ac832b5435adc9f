"""Code for transformers' `custom_generate`, published with heads that no engine loads.

generate.py  the published file
"""

from pathlib import Path

from heads.common.typed import Json

FOLDER = "custom_generate"
KINDS = ("medusa", "hydra", "mlp")


def files(head: Json) -> dict[str, str]:
    """Return the code files to publish with a `head` of config.json, by name; empty if engines load it."""
    if head["name"] not in KINDS or head.get("prefix"):
        return {}
    return {f"{FOLDER}/generate.py": Path(__file__).with_name("generate.py").read_text(encoding="utf-8")}
