"""Folders as they are published, and drafts that are known beforehand."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import Features
from heads.formats.custom_generate import bundle
from heads.formats.custom_generate import generate as entry
from heads.formats.custom_generate.decoding import Drafts
from heads.formats.custom_generate.reading import Head
from heads.formats.custom_generate.target import Embeddings
from heads.formats.hub import kind_of
from heads.formats.published import FORMATS, is_published
from heads.formats.store import save_head
from inference.target.target import Target
from tests import toys

CHAIN = {"kind": "chain", "depth": 4}


def published(folder: Path, head: nn.Module, of: Target, tree: dict[str, Any] | None = None) -> Path:
    """Write a head's folder with the code that reads it."""
    save_head(folder, head, of.spec, tree or CHAIN)
    return shipped(folder)


def shipped(folder: Path) -> Path:
    """Add the code to a head's folder."""
    kind = kind_of(folder)
    (folder / bundle.FOLDER).mkdir(exist_ok=True)
    for name, text in bundle.files(FORMATS[kind].head if is_published(folder) else kind).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


class Known(Drafts):
    """Drafts the continuation that it is told, wrong at every token whose place in the text is in `wrong`."""

    depth = 64
    feature_layers: tuple[int, ...] = ()

    def __init__(self, text: list[int], wrong: set[int], vocab: int = toys.VOCAB) -> None:
        self.text, self.wrong, self.vocab = text, wrong, vocab
        self.restart()

    def restart(self) -> None:
        self.rows, self.at = 0, 0

    def commit(self, features: Features, token: Tensor) -> Tensor:
        assert features.last.shape[1] == len(token)
        self.rows += len(token)
        assert self.text[1 : self.rows + 1][-len(token) :] == token.tolist()
        self.at = self.rows
        return self._next()

    def draft(self, token: Tensor) -> Tensor:
        return self._next()

    def _next(self) -> Tensor:
        self.at += 1
        said = self.text[self.at] if self.at < len(self.text) else 0
        logits = torch.zeros(self.vocab)
        logits[(said + (self.at in self.wrong)) % self.vocab] = 9.0
        return logits


def drafting(monkeypatch: Any, of: Target, drafts: Known, draft_tokens: int = 4) -> None:
    """Let generate draft so, wherever its head is said to be."""
    head = Head(drafts, Embeddings(of.model), draft_tokens)
    monkeypatch.setattr(entry, "load", lambda *_: head)
