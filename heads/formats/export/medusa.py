"""Medusa: for vLLM, which has run it up to 0.32, and as the authors' own code reads it.

vLLM never takes an lm_head from the target: `original_lm_head` gives it one copy for all heads. The authors' code
starts from the target's where the file has none. Its blocks of one head are one module, so that they cannot differ.
"""

import re

import torch

from heads.formats.export.files import Foreign, Shapes
from heads.formats.export.source import Source

BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")


def engines(source: Source) -> Foreign:
    """Return the head for vLLM.

    Raises:
        ValueError: it has options that vLLM does not run.
    """
    source.refuse(draft_vocab=None)
    options, shared = source.config, source.config.lm_head == "shared"
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "torch_dtype": source.dtype,
        "hidden_size": source.embeddings.hidden_size,
        "vocab_size": source.embeddings.vocab_size,
        "num_heads": options.heads,
        "num_hidden_layers": options.layers,
        "medusa_fc_bias": True,  # vLLM leaves the biases out unless this is said
        "original_lm_head": shared,
    }
    heads = 1 if shared else options.heads
    tensors = {BLOCK.sub(r"blocks.\1.layers.\2.\3", name): t for name, t in source.tensors.items() if "blocks" in name}
    tensors |= {f"lm_heads.{i}.weight": source.read_out(f"lm_heads.{i}") for i in range(heads)}
    width, places = config["hidden_size"], _places(config["num_heads"], config["num_hidden_layers"])
    shapes: Shapes = {f"lm_heads.{i}.weight": (config["vocab_size"], width) for i in range(heads)}
    shapes |= {f"blocks.{i}.layers.{j}.weight": (width, width) for i, j in places}
    shapes |= {f"blocks.{i}.layers.{j}.bias": (width,) for i, j in places}
    return Foreign(config, tensors, shapes)


def authors(source: Source) -> Foreign:
    """Return the head for the authors' code.

    Raises:
        ValueError: it has options that their code does not run.
    """
    source.refuse(draft_vocab=None)
    options, embeddings = source.config, source.embeddings
    tensors = {BLOCK.sub(r"\1.\2.linear.\3", name): t for name, t in source.tensors.items() if "blocks" in name}
    for name, tensor in tensors.items():
        if not torch.equal(tensor, tensors[re.sub(r"^(\d+)\.\d+", r"\1.0", name)]):
            raise source.refusal(
                f"layers={options.layers}, of which each is its own",
                "and in the authors' code those of one depth are one and the same; train with head.layers=1",
            )
    config = {
        "medusa_num_heads": options.heads,
        "medusa_num_layers": options.layers,
        "base_model_name_or_path": source.served.name,
        "torch_dtype": source.dtype,
        "version": "2" if options.lm_head == "shared" else "1",
    }
    places = _places(options.heads, options.layers)
    shapes: Shapes = {f"{i}.{j}.linear.weight": (embeddings.hidden_size, embeddings.hidden_size) for i, j in places}
    shapes |= {f"{i}.{j}.linear.bias": (embeddings.hidden_size,) for i, j in places}
    if options.lm_head == "own":
        names = {i: f"{i}.{options.layers}.weight" for i in range(options.heads)}
        tensors |= {name: source.read_out(f"lm_heads.{i}") for i, name in names.items()}
        shapes |= dict.fromkeys(names.values(), (embeddings.vocab_size, embeddings.hidden_size))
    return Foreign(config, tensors, shapes)


def _places(heads: int, layers: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(heads) for j in range(layers)]
