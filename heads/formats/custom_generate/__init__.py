"""A head in plain transformers: the code that a published repository carries as its custom_generate.

The files beside this one are shipped as they are and run without this package: they import the standard library,
torch, transformers and safetensors, each other by relative imports, and nothing else of headstart.

generate.py   the function that transformers calls
decoding.py   the chain: drafted, scored in one pass, taken or replaced
target.py     the model's passes, and the hidden states that heads read of them
reading.py    the head's folder or repository
foreign.py    engines' and authors' layouts by our names
drafts.py     heads by kind, and those without attention
recurrent.py  EAGLE, HASS, EAGLE-3, multi-token prediction
block.py      the block head
readout.py    states to logits
parts.py      norms, rotary positions, the decoder layer
"""

from pathlib import Path

FOLDER = "custom_generate"
NAMES = (
    "block.py", "decoding.py", "drafts.py", "foreign.py", "generate.py", "parts.py", "reading.py", "readout.py",
    "recurrent.py", "target.py",
)  # fmt: skip
REQUIREMENTS = "transformers>=5.17\nsafetensors\n"  # which transformers checks before it runs the code


def files() -> dict[str, str]:
    """Return what a published folder carries, by the names in it: every kind of head in every form is read alike."""
    here = Path(__file__).parent
    texts = {f"{FOLDER}/{name}": (here / name).read_text(encoding="utf-8") for name in NAMES}
    return texts | {f"{FOLDER}/requirements.txt": REQUIREMENTS}
