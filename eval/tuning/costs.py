"""Measure the costs of a decoding step's parts on this device, inside the engine.

A playback drafter proposes trees of the sizes to measure, which contain as many of a recorded text's tokens as should
be accepted; before each it times a real proposal of the head and discards it. If steps are decoded on the device the
head drafts for all sequences at once, as in use. So every part is timed between the others, as in decoding: a loop over
one part would find its weights in the processor's cache and be too fast.
"""

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eval.inputs.workloads import Text
from eval.measures.cost_model import Costs, draft_key, rising
from eval.measures.machine import synchronize
from heads.base import DraftHead, Features
from heads.common.progress import Bar
from inference.batch import Batch, batch_of
from inference.decode import RequestParams, Step
from inference.drafters.head import BatchedState, HeadBatch, HeadDrafter, HeadState
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal, Roots
from inference.target.target import Target
from inference.tree_config import Schedule, Scheduled
from inference.verification import tree as trees
from inference.verification.tree import DraftTree

ROUNDS = 20  # the most rounds over the texts: rare sizes then have fewer samples
# The baseline and playback alternate after so few passes that a machine which slows down for a while slows both alike.
STRETCH = 8
TURNS = 6  # the fewest
Samples = defaultdict[int, list[float]]
T = TypeVar("T")
K = TypeVar("K")


class Playback(Drafter):
    """A drafter that times a head's proposals and commits, and drafts trees of given sizes from recorded texts.

    All sequences of a batch share its schedule and its times. Without a head nothing is timed.
    """

    name, tree = "playback", "playback"

    def __init__(
        self,
        target: Target,
        head: HeadDrafter | None,
        texts: Sequence[Text],
        measured: Sequence[TreeConfig],
        sizes: Sequence[int],
        seed: int,
    ) -> None:
        shuffle = random.Random(seed)
        deepest = max((tree.deepest for tree in measured), default=max(sizes))
        self.target, self.inner, self.measured = target, head, measured
        self.batch: PlaybackBatch | None = None  # drafts for all sequences at once, if steps run on the device
        self.feature_layers = () if head is None else head.feature_layers
        self.texts = {tuple(text.prompt): text for text in texts}
        self.next_tree = rotation(measured, shuffle)
        self.next_size, self.next_accepted = rotation(sizes, shuffle), rotation(range(deepest + 1), shuffle)
        self.next_chain = rotation([False, True], shuffle)
        self.size, self.largest = 0, max(sizes)  # nodes of every sequence's draft: in the current pass, and at most
        self.draft: defaultdict[str, list[float]] = defaultdict(list)  # seconds of a proposal, by `draft_key`
        self.commit: Samples = defaultdict(list)  # seconds of the head's pass, by the most tokens of any sequence

    def begin(self) -> None:
        """Choose the size of the next pass."""
        self.size = next(self.next_size)

    def clones(self, size: int) -> "tuple[Sequence[Drafter], PlaybackBatch | None]":
        """Return itself for every sequence, and the batch's drafter if steps are decoded on the device."""
        if self.inner is not None and self.target.takes_trees and self.target.switch is None:
            self.batch = PlaybackBatch(self, self.inner.head, size)
        return [self] * size, self.batch

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin the text with this prompt."""
        if self.batch is not None:
            return BatchedPlayback(self.batch, self.texts[tuple(prompt)])
        head = None if self.inner is None else HeadState(self.inner.head, self.inner.policy)
        return PlaybackState(self, head, self.texts[tuple(prompt)])

    def clock(self) -> float:
        """Return the clock's seconds, after the device has finished its queued work."""
        synchronize(self.target.device)
        return time.perf_counter()


class PlaybackState(DrafterState):
    """The state of one recorded text's playback."""

    def __init__(self, playback: Playback, head: HeadState | None, text: Text) -> None:
        self.playback, self.head, self.text = playback, head, text

    def update(self, commit: Commit) -> None:
        """Let the head append rows, timed unless they are a prompt's."""
        if self.head is None:
            return
        start = self.playback.clock()
        self.head.update(commit)
        if commit.verified is not None:
            self.playback.commit[len(commit.token)].append(self.playback.clock() - start)

    def propose(self, context: Context) -> Proposal:
        """Time one of the head's trees, and return a tree of the size to measure."""
        playback, target, max_draft_depth = self.playback, self.playback.target, max(context.max_draft_depth, 0)
        if self.head is not None:
            policy = next(playback.next_tree)
            start = playback.clock()
            self.head.grow(policy, context._replace(max_draft_depth=policy.deepest))
            playback.draft[draft_key(policy)].append(playback.clock() - start)
        following = self.text.token[len(context.token) :][:max_draft_depth]
        # A chain of this size may be deeper than is allowed.
        size = playback.size if max_draft_depth and target.takes_trees else min(playback.size, max_draft_depth)
        accepted = min(next(playback.next_accepted), size)
        return Proposal(planted(context.token[-1], following[:accepted], size, target))


class BatchedPlayback(BatchedState):
    """State of one recorded text in a batch; the root is the token at `position`."""

    def __init__(self, batch: "PlaybackBatch", text: Text) -> None:
        super().__init__(batch)
        self.text, self.position = text, text.start

    def planted(self, accepted: int, size: int, chain: bool, target: Target) -> DraftTree:
        """Return a tree that contains the next `accepted` tokens; after the text's end any tree."""
        tokens = [*self.text.token[self.position :], *[0] * (accepted + 1)][: accepted + 1]
        return planted(tokens[0], tokens[1:], size, target, chain)


class PlaybackBatch(HeadBatch):
    """A head that drafts for several recorded texts at once, timed; trees of given sizes are verified instead."""

    def __init__(self, playback: Playback, head: DraftHead, size: int) -> None:
        # One line a tree, to allocate for the largest.
        super().__init__(head, Schedule([Scheduled(1 + i, tree) for i, tree in enumerate(playback.measured)]), size)
        self.playback, self.accepted = playback, 0
        self.max_nodes = max(self.max_nodes, 1 + playback.largest)

    def begin(self, running: int, longest: int) -> None:
        """Choose the head's tree, and the depth of the planted ones."""
        playback = self.playback
        self.policy, self.chain = next(playback.next_tree), next(playback.next_chain)
        self.accepted = min(next(playback.next_accepted), playback.size)
        self.deepest = playback.size if self.chain else min(playback.size, max(self.accepted, 1))

    def draft_trees(
        self, roots: Roots, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> tuple[DraftTree, Bool[Tensor, "#B N N"], None]:
        """Time the head's trees, and return the planted ones; an idle slot's is the first sequence's."""
        playback = self.playback
        assert self.policy is not None
        start = playback.clock()
        super().draft_trees(roots, max_draft_depth, longest, allow_host_sync=allow_host_sync)
        playback.draft[draft_key(self.policy)].append(playback.clock() - start)
        states = [state for state in self.states if isinstance(state, BatchedPlayback)]
        drafts = [state.planted(self.accepted, playback.size, self.chain, playback.target) for state in states]
        drafts += drafts[:1] * (len(max_draft_depth) - len(drafts))
        tree = DraftTree(*(torch.stack(rows) for rows in zip(*drafts, strict=True)))
        return tree, trees.ancestors(tree), None

    def commit(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Append rows for all texts, timed, and advance in the texts."""
        start = self.playback.clock()
        super().extend(features, count)
        self.playback.commit[features.token.shape[1]].append(self.playback.clock() - start)
        for state, taken in zip(self.states, count.tolist(), strict=False):
            assert isinstance(state, BatchedPlayback)
            state.position += taken


def planted(root: int, tokens: Sequence[int], size: int, target: Target, chain: bool = False) -> DraftTree:
    """Return a tree of `size` drafted nodes, level by level, that has these tokens as a path of first children.

    All other nodes are wrong: siblings of the tokens, or after them in a chain or if the target takes chains alone.
    """
    vocabulary, device = target.embeddings.vocab_size, target.device
    token, parent = [root], [-1]
    levels = max(len(tokens), 1)
    spare = size - len(tokens)
    above = 0
    for level in range(levels):
        right = list(tokens[level : level + 1])
        wrong = spare // levels + (level < spare % levels) if target.takes_trees and not chain else 0
        first = right[0] if right else token[above]
        row = right + [(first + 1 + i) % vocabulary for i in range(wrong)]
        token += row
        parent += [above] * len(row)
        above = len(token) - len(row)
    while len(token) <= size:
        parent.append(len(token) - 1)
        token.append((token[-1] + 1) % vocabulary)
    return DraftTree(torch.tensor(token, device=device), torch.tensor(parent, device=device))


@torch.inference_mode()
def measure(
    target: Target,
    head: HeadDrafter | None,
    texts: Sequence[Text],
    measured: Sequence[TreeConfig],
    sizes: Sequence[int],
    samples: int,
    settings: RequestParams,
    batch: int = 1,
) -> Costs:
    """Measure the costs on recorded texts, alternating a few passes of the autoregressive baseline and of playback.

    Args:
        target: the target that wrote the texts, under the same settings.
        head: the draft head as a drafter. None: a draft that costs nothing.
        texts: the texts to decode again, `batch` of them side by side in every pass.
        measured: the trees whose proposals are timed; none without a head.
        sizes: the numbers of drafted nodes whose verification is timed; 0 is an autoregressive step.
        samples: the fewest samples of each.
    """
    player = Playback(target, head, texts, measured, sizes, settings.seed)
    verify: Samples = defaultdict(list)
    other: tuple[Samples, Samples] = (defaultdict(list), defaultdict(list))
    plain: list[float] = []
    keys = {draft_key(tree) for tree in measured}
    label = f"timing passes and drafts, batch size {batch}"
    with target.uncaptured(), Bar(samples, label) as bar:  # CUDA graphs cannot be timed in parts
        baseline = decode(batch_of(target, Baseline(target.device), batch), texts, settings, lambda: None)
        played = decode(batch_of(target, player, batch), texts, settings, player.begin)
        for _ in sizes:  # the first passes of every size are slower
            next(baseline)
            next(played)
        player.draft.clear()
        player.commit.clear()
        left = ROUNDS * sum(text.generated for text in texts)
        for turn in itertools.count(1):
            for steps in itertools.islice(baseline, STRETCH):
                plain.append(sum(step.draft_s + step.verify_s + step.other_s for step in steps))
            for steps in itertools.islice(played, STRETCH):
                size, bent = max(step.drafted for step in steps), any(step.accepted > 1 for step in steps)
                if player.batch is not None:  # whatever depth each may have
                    size, bent = player.size, not player.batch.chain
                verify[size].append(sum(step.verify_s for step in steps))
                other[bent][size].append(sum(step.other_s for step in steps))
                left -= sum(step.committed for step in steps)
            drafts = [player.draft[key] for key in keys]
            fewest = min(map(len, [*drafts, *(verify[size] for size in sizes)]))
            bar.show(min(fewest, samples))
            # Rare sizes may have fewer samples, but every tree's draft must be timed.
            if turn >= TURNS and (fewest >= samples or (left <= 0 and all(drafts))):
                break
    straight, gaps = map(averages, other)
    return Costs(
        batch=batch,
        plain=typical(plain),
        verify=rising(averages(verify)),
        settle=(straight, gaps or straight),
        draft=averages(player.draft),
        commit=averages(player.commit) or {1: 0.0},
    )


def decode(
    batch: Batch, texts: Sequence[Text], settings: RequestParams, begin: Callable[[], None]
) -> Iterator[list[Step]]:
    """Decode the texts in a batch again and again; yield the steps of every pass, before which `begin` is called."""
    waiting = enumerate(itertools.cycle(texts))
    while True:
        while batch.free:
            number, text = next(waiting)
            batch.admit(number, text.prompt, settings)
        begin()
        requests = [sequence.request for sequence in batch.running]
        batch.step()
        batch.release()
        yield [request.generation.steps[-1] for request in requests]


def averages(samples: Mapping[K, Sequence[float]]) -> dict[K, float]:
    """Return the `typical` value of every key that has samples."""
    return {key: typical(values) for key, values in samples.items() if values}


def typical(values: Sequence[float]) -> float:
    """Return the mean without the lowest and highest twentieth.

    A short part has few but long interruptions, which a median would miss; a single outlier must not count either.
    """
    ordered = sorted(values)
    cut = len(ordered) // 20
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


def rotation(items: Sequence[T], shuffle: random.Random) -> Iterator[T]:
    """Yield all items in a random order, then again in another, without end."""
    while True:
        yield from shuffle.sample(list(items), len(items))
