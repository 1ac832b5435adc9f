"""The loss on a dummy accelerator, which raises where a host would wait for it: how many operations it launches.

Started as a script, it prints as JSON what each case in its arguments launches: a toy head's name with how its depths
are weighted and where its teacher comes from, or the sizes of a plain one: vocabulary, drafted tokens, rows, depths.
"""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import LlamaConfig

from heads.base import Draft, DraftVocabulary, Features
from heads.modules.vocab import DraftLmHead
from inference.target.embeddings import TargetEmbeddings
from tests.inference.accelerator import NAME, Watch, on_dummy
from tests.train.test_objective import CONFIG
from train.losses import ObjectiveConfig
from train.objective import Chunk, LossContext, chunk_rows, chunked, labels, loss_weights, objective
from train.planning.shapes import embeddings_of

HOST, WIDTH = torch.device("cpu"), 8


class Plain(nn.Module):
    """A head that is an lm_head of its own over some of a target's vocabulary."""

    def __init__(self, full: int, drafted: int) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=WIDTH, vocab_size=full, num_hidden_layers=1, num_attention_heads=1)
        self._embeddings = (embeddings_of(config, torch.float32),)
        self.vocab = None if drafted == full else DraftVocabulary(drafted, full)
        self.lm_head = DraftLmHead(self.embeddings, "own", self.vocab)

    @property
    def embeddings(self) -> TargetEmbeddings:
        return self._embeddings[0]

    def compute_logits(self, state: Tensor, _depth: int) -> Tensor:
        return self.lm_head(state)


class Allocations(TorchDispatchMode):
    """Notes the most bytes that the results of operations on fake tensors have at once."""

    def __init__(self) -> None:
        init: Any = super().__init__
        init()
        self.live, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):  # an input that was there before
                self.count(leaf.untyped_storage(), 0)
        out = 1 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return out

    def count(self, storage: Any, size: int) -> None:
        """Count a storage until it is freed, unless it is counted already."""
        if id(storage) not in self.known:
            self.known.add(id(storage))
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.release, id(storage), size)

    def release(self, key: int, size: int) -> None:
        """Remove a freed storage."""
        self.known.discard(key)
        self.live -= size


def on_device(x: Any) -> Any:
    """Return a tensor's like on the dummy."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=NAME, requires_grad=x.requires_grad)


def launches(
    head: Any, drafts: list[Draft], features: Features, weight: Tensor, of: ObjectiveConfig, chunks: list[Chunk]
) -> int:
    """Return how many operations loss and gradient launch, of tensors that are moved to the dummy."""
    trained = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    given = (drafts, features, weight, chunks)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_dummy(head)
        on_dummy(head.embeddings)
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(name in trained)
        drafts, features, weight, chunks = tree_map(on_device, given)
        with Watch() as watch:
            loss, _ = objective(head, drafts, features, weight, of, chunks)
            loss.backward()
    return sum(count for name, count in watch.counts.items() if name.startswith("aten."))


def plain(full: int, drafted: int, rows: int, depths: int) -> int:
    """Return what the cross-entropy launches of rows that are all trained, as many a chunk as a device takes."""
    head, of = Plain(full, drafted), replace(CONFIG, depths=depths)
    token, states = torch.zeros(1, rows, dtype=torch.long), torch.zeros(1, rows, WIDTH)
    features = Features(token, states[:, :, None][:, :, :0], states, token)
    drafts = [Draft(states.clone().requires_grad_()) for _ in range(depths)]
    found = loss_weights(token, token + 1, None, of)
    chunks = chunked(found.trained, chunk_rows(head, NAME, found.trained.numel()), HOST)
    return launches(head, drafts, features, found.row, of, chunks)


def peak(rows: int, depths: int, *, whole: bool, autocast: bool) -> int:
    """Return the bytes that loss and gradient of a vocabulary of 128,256 take above their inputs.

    The last rows are trained at no depth, so that what teaches a depth is gathered, as of any text.
    """
    head, of = Plain(128_256, 128_256), replace(CONFIG, depths=depths)
    token, states = torch.zeros(1, rows, dtype=torch.long), torch.zeros(1, rows, WIDTH)
    features = Features(token, states[:, :, None][:, :, :0], states, token)
    drafts = [Draft(states.clone().requires_grad_()) for _ in range(depths)]
    weight = loss_weights(token, token + 1, None, of).row
    chunks = chunked(weight > 0, rows if whole else chunk_rows(head, "cuda", weight.numel()), HOST)
    quick = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with FakeTensorMode(allow_non_fake_inputs=True), Allocations() as allocated, quick:
        if whole:
            work = LossContext(head, features, weight.flatten(1), of, chunks, labels(head, features))
            loss, _ = work.run([[draft.state.flatten(0, 1), None, None, None] for draft in drafts])
        else:
            loss, _ = objective(head, drafts, features, weight, of, chunks)
        loss.backward()
    return allocated.peak


def of_case(name: str, *rest: str) -> Any:
    """Return what a case counts."""
    if name == "memory":
        rows, depths = map(int, rest[:2])
        return [peak(rows, depths, whole=whole, autocast=rest[2] == "bf16") for whole in (True, False)]
    return plain(*map(int, (name, *rest)))
