"""What a freshly loaded target must prove: its teacher, its tree pass, and its cache, on a handful of tokens.

A wrong final norm or an ignored mask costs acceptance or losslessness and raises no error by itself; so it is measured.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inference import tree
from inference.parts import Entered
from inference.tree import DraftTree

if TYPE_CHECKING:
    from inference.target import Target

# A prompt of four, then a root with two children of which the second has a child.
PROMPT, PARENTS = 4, [-1, 0, 0, 2]
# Logits may differ by rounding alone; a wrong mask or norm moves them by about their own spread.
TOLERANCE = 0.1


@torch.no_grad()
def check(target: "Target") -> bool:
    """Return whether the target verifies trees exactly; false leaves chains.

    Raises:
        ValueError: lm_head of the last hidden state is not the model's logits, or even a chain cannot be verified.
    """
    generator = torch.Generator().manual_seed(0)
    token = torch.randint(target.ends.vocab_size, (PROMPT + len(PARENTS),), generator=generator).to(target.device)
    prompt, nodes = token[:PROMPT], token[PROMPT:]
    drafted = DraftTree(nodes, torch.tensor(PARENTS, device=target.device))
    full = target.model(input_ids=token[None], use_cache=False).logits[0, -1]
    if not _close(target.prefill(token, target.cache()).logits, full):
        raise ValueError(
            f"{target.name}: lm_head(last hidden state) is not this model's logits; its architecture scales or caps "
            "them in a way headstart does not know"
        )
    target.takes_trees = True
    try:
        if _tree_is_exact(target, prompt, drafted):
            return True
    except (ValueError, RuntimeError, TypeError, AttributeError):
        pass  # an attention that rejects a 4-d mask says so in its own way; a chain needs none
    target.takes_trees = False
    chain = DraftTree(nodes, torch.arange(-1, len(nodes) - 1, device=target.device))
    if not _tree_is_exact(target, prompt, chain):
        raise ValueError(
            f"{target.name}: its cache cannot be rolled back (a recurrent state?), so no draft can be verified"
        )
    return False


@torch.no_grad()
def splits(target: "Target", layers: int) -> bool:
    """Return whether a chain that has run through the first layers gives the full pass's logits from there on."""
    token = torch.arange(2 * PROMPT, device=target.device) % target.ends.vocab_size
    prompt, nodes = token[:PROMPT], token[PROMPT:]
    chain = DraftTree(nodes, torch.arange(-1, PROMPT - 1, device=target.device))
    whole, split = target.cache(), target.cache()
    target.prefill(prompt, whole)
    target.prefill(prompt, split)
    position, seen = tree.layout(chain, PROMPT)
    hidden, _ = target.parts.enter(layers, nodes, position, seen, split)
    found = target.parts.score_from(Entered(layers, hidden), chain, split).logits
    return _close(found, target.score(chain, whole).logits)


@torch.no_grad()
def packs(target: "Target") -> bool:
    """Return whether documents packed in a row have the last hidden states that each has by itself."""
    token = torch.arange(2 * PROMPT, device=target.device)[None] % target.ends.vocab_size
    document = (torch.arange(2 * PROMPT, device=target.device) > PROMPT).long()[None]
    alone = [
        target.run(part, torch.arange(part.shape[1], device=target.device)[None], None, None).last
        for part in (token[:, : PROMPT + 1], token[:, PROMPT + 1 :])
    ]
    try:
        packed = target.own_features(token, document).last
    except (ValueError, RuntimeError, TypeError, AttributeError):
        return False  # an attention that is not what it seemed says so in its own way
    return _close(packed, torch.cat(alone, 1))


def _tree_is_exact(target: "Target", prompt: Tensor, drafted: DraftTree) -> bool:
    """Compare one tree pass with the plain pass of each path, and the compacted cache with a fresh prefill."""
    for path in tree.paths(drafted):
        cache = target.cache()
        target.prefill(prompt, cache)
        together = target.score(drafted, cache).logits
        assert together is not None
        sequence = torch.cat([prompt, drafted.token[path]])
        alone = target.prefill(sequence, target.cache()).logits
        cache.keep(len(prompt), path)
        following = target.prefill(drafted.token[:1], cache).logits
        fresh = target.prefill(torch.cat([sequence, drafted.token[:1]]), target.cache()).logits
        if not (_close(together[0, path[-1]], alone) and _close(following, fresh)):
            return False
    return True


def _close(found: Tensor | None, expected: Tensor | None) -> bool:
    assert found is not None
    assert expected is not None
    found, expected = found.float().flatten(), expected.float().flatten()
    return bool((found - expected).abs().max() < TOLERANCE * expected.std().clamp_min(1e-6))
