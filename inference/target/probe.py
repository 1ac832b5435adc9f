"""Checks of a freshly loaded target on a few tokens: its teacher, its tree and batch passes, and its KV cache.

A wrong final norm or an ignored mask costs acceptance or losslessness without an error, so it is measured, after a
prompt that is longer than the target's windows and chunks. A window that is too long to run is shortened during the
check if our mask applies it; if the attention applies it itself, its masks are not trusted.

The hidden states after every layer are compared, to separate rounding from a wrong mask: with a right mask logits of
Gemma 3 270M in bf16 differ by up to 0.28 of their standard deviation and its hidden states by 0.04; with a wrong mask
the hidden states differ by 0.5 (docs/targets.md, "Rounding and masks").
"""

import re
from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import Tensor

from heads.common.target_config import UNFIT
from inference.target.attention import FULL, GROUPED, SLIDING, Ragged, RowGroup, spans_of
from inference.target.model import TargetModel, TargetOutput
from inference.verification.tree import DraftTree, ancestors, chain

# After a prompt of four, a root with seven children, the last of which has a child, far from its position.
PROMPT, PARENTS, DEPTH = 4, [-1, 0, 0, 0, 0, 0, 0, 0, 7], 2
LONGEST = 64  # tokens of the longest window that is tested
APPLIED = "sliding_window"  # the window that `attention_mask` applies
WINDOW = re.compile(r"window|chunk|local_attention")
# Share of the standard deviation, compared in norm: some of 128,000 bf16 logits are always far off.
TOLERANCE = 0.1
Check = Callable[[TargetModel, Tensor, DraftTree], bool]


@torch.inference_mode()
def check(target: TargetModel) -> bool:
    """Return whether the target verifies trees and batches exactly; if not, only chains, one sequence at a time.

    The reason is left in `target.incompatibility`.

    Raises:
        ValueError: it does not run on a key-value cache, lm_head of the last hidden state is not the model's logits, or
            even a chain cannot be verified.
    """
    window = getattr(target.config, APPLIED, None)
    if window is not None and getattr(target.model, "_supports_attention_backend", False):
        setattr(target.config, APPLIED, min(window, PROMPT))
    try:
        return _check(target)
    finally:
        if window is not None:
            setattr(target.config, APPLIED, window)


def _check(target: TargetModel) -> bool:
    window_sizes = windows(target.model, target.max_model_len)
    room = target.max_model_len - len(PARENTS) - 1  # for the prompt, in one pass
    if target.longrope is not None:  # a request keeps its passes on one side of it
        room = min(room, target.longrope.length - DEPTH - 2)
    longest = max((size for size in window_sizes.values() if size <= LONGEST), default=0)
    length = max(1, min(PROMPT + longest, room))
    generator = torch.Generator().manual_seed(0)
    token = torch.randint(target.embeddings.vocab_size, (length + len(PARENTS),), generator=generator).to(target.device)
    prompt, nodes = token[:length], token[length:]
    _check_logits(target, prompt)
    target.takes_trees = target.recurrence is None
    drafted = DraftTree(nodes, torch.tensor(PARENTS, device=target.device))
    far = [f"{key}={value}" for key, value in window_sizes.items() if value > LONGEST]
    exact = (_is_exact(compare, target, prompt, drafted) for compare in (_tree_is_exact, _batch_is_exact))
    if target.takes_trees and not far and all(exact):
        if target.config._attn_implementation == GROUPED and target.device.type == "cpu":
            target.takes_ragged = _is_exact(partial(_batch_is_exact, ragged=True), target, prompt, drafted)
        return True
    target.takes_trees = False
    why = f"applies {far[0]} itself" if far else "gives a tree or a batch other logits than its sequences alone"
    target.incompatibility = f"its attention ignores custom masks ({target.architecture} {why})"
    if target.recurrence is not None:
        target.incompatibility = f"its recurrent layers keep the state of one path ({target.architecture})"
    if not _is_exact(_tree_is_exact, target, prompt, chain(nodes[: DEPTH + 1])):
        _check_finite(target)
        why = "its cache cannot be rolled back (a recurrent state outside it?)"
        if target.recurrence is not None and target.recurrence.mixers:
            version = transformers.__version__
            why = f"transformers {version} runs no pass over several tokens after its recurrent states"
        raise ValueError(
            f"{target.name} ({target.architecture}): {why}, so no draft can be verified: choose another target"
        )
    return False


def _check_finite(target: TargetModel) -> None:
    """Check that the weights are finite; some kernels turn NaN into zeros."""
    for name, value in target.model.named_parameters():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            whose = target.name + (f" with model.adapter={target.spec.adapter}" if target.spec.adapter else "")
            raise ValueError(f"{whose}: {name} holds a value that is not finite: download its weights again")


def _check_logits(target: TargetModel, prompt: Tensor) -> None:
    """Check that the model runs on our cache, and that its logits are lm_head(last hidden state)."""
    who, some = f"{target.name} ({target.architecture})", prompt[:PROMPT]
    try:
        full = target.model(input_ids=prompt[None], use_cache=False).logits[0]
        whole, early = (target.prefill(tokens, target.cache()).last_hidden[0] for tokens in (prompt, some))
    except UNFIT as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if kinds := {*(getattr(target.config, "layer_types", None) or [])} - {FULL, SLIDING}:
            reason = f"it has layers of the kind {', '.join(sorted(kinds))}"
        if getattr(target.model, "_is_stateful", False):
            reason = "it keeps a recurrent state, beside no attention or in a way that is not known here"
        raise ValueError(
            f"{who}: headstart does not run this architecture ({reason}): choose another target"
        ) from error
    if not _close(target.embeddings.logits(whole[-1:]), full[-1]):
        _check_finite(target)
        raise ValueError(
            f"{who}: lm_head(last hidden state) is not this model's logits; its architecture scales or caps them in a "
            "way headstart does not know"
        )
    if not _close(early[-1], whole[len(some) - 1]):
        raise ValueError(
            f"{who}: what follows a prefix changes the logits after it, so no draft can be verified: choose a causal "
            "target"
        )


def _is_exact(check: Check, target: TargetModel, prompt: Tensor, drafted: DraftTree) -> bool:
    try:
        return check(target, prompt, drafted)
    except UNFIT:
        return False  # the attention rejects a 4-d mask; a chain needs none


@torch.no_grad()
def packs(target: TargetModel) -> bool:
    """Return whether packed documents have the last hidden states of each document in a pass of its own."""
    index = torch.arange(2 * PROMPT, device=target.device)
    token = index[None] % target.embeddings.vocab_size
    document = (index > PROMPT).long()[None]
    single = [
        target.run(tokens, torch.arange(tokens.shape[1], device=target.device)[None], None, None).last_hidden
        for tokens in (token[:, : PROMPT + 1], token[:, PROMPT + 1 :])
    ]
    try:
        packed = target.own_features(token, document, (), spans_of(document)).last_hidden
    except UNFIT:
        return False  # an unexpected attention may raise anything
    return _close(packed, torch.cat(single, 1))


def _tree_is_exact(target: TargetModel, prompt: Tensor, drafted: DraftTree) -> bool:
    """Compare a tree pass with sequential passes of its paths, and the compacted cache with a fresh prefill."""
    layers = tuple(range(len(target.decoder_layers)))
    # The first path of the tree, and the last one, whose entries are farthest from their positions.
    for path in [[0, 1], [0, int(drafted.parent[-1]), len(drafted.token) - 1]]:
        cache = target.cache()
        target.prefill(prompt, cache)
        together = target.score(drafted, cache, layers)
        sequence = torch.cat([prompt, drafted.token[path]])
        single = target.prefill(sequence, target.cache(), layers)
        cache.keep(len(prompt), path)
        following = target.prefill(drafted.token[:1], cache, layers)
        fresh = target.prefill(torch.cat([sequence, drafted.token[:1]]), target.cache(), layers)
        if not (_same_rows(together, path, single) and _same_rows(following, [0], fresh)):
            return False
    return True


def _batch_is_exact(target: TargetModel, prompt: Tensor, drafted: DraftTree, ragged: bool = False) -> bool:
    """Compare a batched pass over a short and a long sequence with the passes of each."""
    layers = tuple(range(len(target.decoder_layers)))
    cache = target.batch_cache(2)
    prompts = (prompt[:PROMPT], torch.cat([prompt[:1], prompt]))
    for sequence in prompts:
        target.prefill(sequence, cache.allocate())
    length = torch.tensor([len(sequence) for sequence in prompts], device=target.device)
    mask = ancestors(drafted)[None]
    depth = (mask.sum(-1) - 1).expand(2, -1)
    rows, seen, column = cache.storage.tree_pass(length, mask, depth, len(prompts[1]) + len(drafted.token))
    token = drafted.token.expand(2, -1)
    pass_inputs = token, length[:, None] + depth, seen, rows, layers, column
    ends = [len(sequence) + token.shape[1] for sequence in prompts]
    groups = [RowGroup(b, b + 1, *rows, end) for rows in ((0, 2), (2, token.shape[1])) for b, end in enumerate(ends)]
    out = target.run_ragged(Ragged(groups), *pass_inputs) if ragged else target.run(*pass_inputs)
    path = [0, int(drafted.parent[-1]), len(drafted.token) - 1]
    for row, sequence in enumerate(prompts):
        single = target.prefill(torch.cat([sequence, drafted.token[path]]), target.cache(), layers)
        if not _same_rows(TargetOutput(out.hidden[row : row + 1], out.last_hidden[row : row + 1], None), path, single):
            return False
    return True


def _same_rows(out: TargetOutput, path: list[int], single: TargetOutput) -> bool:
    """Compare a path's rows with the last rows of another pass: the states after each layer and the norm."""
    count = len(path)
    return _close(out.hidden[0, path], single.hidden[0, -count:]) and _close(
        out.last_hidden[0, path], single.last_hidden[0, -count:]
    )


def _close(actual: Tensor, expected: Tensor) -> bool:
    actual, expected = actual.float(), expected.float()
    deviation = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
    return bool(((actual - expected).norm(dim=-1) < TOLERANCE * deviation).all())


def windows(model: "transformers.PreTrainedModel", context: int) -> dict[str, int]:
    """Return the windows and chunks that are smaller than `context`, by their keys in the configuration."""
    values = vars(model.config.get_text_config())
    return {
        key: value for key, value in values.items() if WINDOW.search(key) and type(value) is int and 1 < value < context
    }
