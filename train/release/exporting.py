"""Exporting a run's head to a foreign format, with the target's embedding and lm_head where the format copies them."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from heads.formats.hub import on_hub, target_path
from heads.formats.published.export import Served, export
from heads.formats.store import load_head, read_config
from inference.target.config import DTYPES
from inference.target.embeddings import TargetEmbeddings
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target

log = logging.getLogger(__name__)


@contextmanager
def exported(head: Path, form: str | None, where: str | None, dtype: str, draft_tokens: int) -> Iterator[Path]:
    """Give the folder of a head in a format until the block ends, the head's own without one.

    Args:
        head: a head's folder.
        form: one of heads.formats.published.export.FORMATS.
        where: the target's folder or Hub id, None for the one that the head names.
        dtype: of the exported tensors, a name in DTYPES.
        draft_tokens: a pass, where an engine takes that from the repository.

    Raises:
        ValueError: the target cannot be loaded or is another, or the format cannot hold this head.
    """
    if form is None:
        yield head
        return
    spec = read_config(head)["target"]
    path = where or target_path(spec["name"])
    target = _load(path, spec.get("adapter"))
    _assert_plain(target.embeddings, path)
    name = spec["name"] if on_hub(spec["name"]) else path
    served = Served(
        name=name if on_hub(name) else Path(name).name,
        config=target.config.to_dict(),
        dtype=DTYPES[dtype],
        draft_tokens=draft_tokens,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "head"
        export(load_head(head, target.embeddings, target.spec), form, served, folder)
        yield folder


def _load(path: str, adapter: str | None) -> Target | EmbeddingsOnly:
    """Return the target, without its layers where it can be loaded so, on the CPU and in the dtype of its files."""
    if adapter is None:
        try:
            return EmbeddingsOnly.load(path, "float32", "cpu", False)
        except ValueError as error:
            log.warning("%s; the whole target is loaded", error)
    return Target.load(path, "float32", "cpu", adapter=adapter)


@torch.no_grad()
def _assert_plain(embeddings: TargetEmbeddings, path: str) -> None:
    """Check that embedding and lm_head are plain table look-ups, for engines read the tables.

    Raises:
        ValueError: the embedding is scaled, or the logits have a bias or a cap.
    """
    few = torch.arange(min(embeddings.vocab_size, 64))
    state = torch.randn(4, embeddings.hidden_size, generator=torch.Generator().manual_seed(0)) * 9
    embedded, logits = embeddings.embed(few), embeddings.logits(state)
    table: Any = embeddings.embedding.weight
    scaled = not torch.equal(embedded, table[few])
    if scaled or not torch.allclose(logits, state @ embeddings.head_weight().T, rtol=1e-3, atol=1e-3):
        what = "its embedding is scaled" if scaled else "its logits have a bias or a cap"
        raise ValueError(f"{path}: {what}, which engines do not know when they draft; publish without format")
