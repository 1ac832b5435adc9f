"""The custom_generate of published heads that no engine loads, by which transformers decodes with them.

generate.py  the file that is published
"""

from pathlib import Path
from typing import Any

FOLDER = "custom_generate"
KINDS = ("medusa", "hydra", "mlp")


def files(head: dict[str, Any]) -> dict[str, str]:
    """Return a published folder's code by file name for the `head` of its config.json, empty if engines load it."""
    if head["name"] not in KINDS or head.get("prefix"):
        return {}
    return {f"{FOLDER}/generate.py": Path(__file__).with_name("generate.py").read_text(encoding="utf-8")}
