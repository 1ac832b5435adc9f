"""Measure the costs of a decoding step's parts on this device, inside the engine.

A drafter plays a recorded text back to the engine: the trees that it hands over have the sizes to be measured and
hold as many of the text's tokens as are to be accepted, and before each it times a draft that it then throws away.
So every part is timed between the others, as in decoding: a loop over one part alone finds its weights still in the
processor's cache, and reports less than the part costs.
"""

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eval.inputs.workloads import Text
from eval.measures.cost_model import Costs, draft_key, rising
from eval.measures.machine import synchronize
from heads.base import DraftHead, Features
from heads.common.progress import Bar
from inference.batch import Batch, batch_of
from inference.decode import RequestParams, Step
from inference.drafters.head import HeadBatch, HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import Schedule, Scheduled, TreeConfig
from inference.protocol import Context, DraftBatch, Drafted, Drafter, DraftInputs, DraftPlan, DraftTraits
from inference.target.model import TargetOutput
from inference.target.target import Target
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
        self.texts = {tuple(text.prompt): text for text in texts}
        self.next_tree = rotation(measured, shuffle)
        self.next_size, self.next_accepted = rotation(sizes, shuffle), rotation(range(deepest + 1), shuffle)
        self.next_chain = rotation([False, True], shuffle)
        self.size, self.largest = 0, max(sizes)  # the nodes that every sequence drafts: in the current pass, at most
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)  # of a draft, by `draft_key`
        self.commits: Samples = defaultdict(list)  # seconds of the head's pass, by the most tokens of any sequence

    def begin(self) -> None:
        """Choose the size of the next pass."""
        self.size = next(self.next_size)

    def batch(self, size: int) -> "PlaybackBatch | PlantedBatch":
        """Return what drafts for all sequences."""
        self.drafts = PlantedBatch(self) if self.inner is None else PlaybackBatch(self, self.inner.head, size)
        return self.drafts

    def clock(self) -> float:
        """Return the clock's seconds, after the device has finished its queued work."""
        synchronize(self.target.device)
        return time.perf_counter()


class PlantedBatch(DraftBatch):
    """Trees of given sizes, whose path is that of recorded texts: a draft that costs nothing."""

    def __init__(self, playback: Playback) -> None:
        self.playback, self.accepted = playback, 0
        self.traits = DraftTraits(max_nodes=1 + playback.largest)
        self.texts: dict[int, list[int]] = {}  # by slot, what follows

    def start_sequence(self, slot: int, token: list[int], features: TargetOutput) -> None:
        """Begin a text."""
        text = self.playback.texts[tuple(token[:-1])]
        self.texts[slot] = text.token[text.start :]

    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move a text."""
        self.texts[slot] = self.texts[from_slot]

    def begin(self, contexts: Sequence[Context | None], longest: int) -> DraftPlan:
        """Choose the depth of the trees."""
        playback = self.playback
        self.chain = next(playback.next_chain) or not playback.target.takes_trees
        self.accepted = min(next(playback.next_accepted), playback.size)
        deepest = playback.size if self.chain else min(playback.size, max(self.accepted, 1))
        return DraftPlan(deepest, self.traits.max_nodes, self.chain)

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Return the planted trees; an idle slot's is the first sequence's. Behind a text's end any token will do."""
        drafts, more = [], [0] * (self.accepted + 1)
        for slot in range(len(max_draft_depth)):
            token = [*self.texts.get(slot, self.texts[0]), *more][: self.accepted + 1]
            drafts.append(planted(token[0], token[1:], self.playback.size, self.playback.target, self.chain))
        tree = DraftTree(*(torch.stack(rows) for rows in zip(*drafts, strict=True)))
        return Drafted(tree, trees.ancestors(tree))

    def learn(self, slot: int, token: list[int], path: list[int], logits: Float[Tensor, "M V"] | None) -> None:
        """Move on in a text."""
        del self.texts[slot][: len(token)]


class PlaybackBatch(HeadBatch):
    """A head that drafts for several recorded texts at once, timed; trees of given sizes are verified instead."""

    def __init__(self, playback: Playback, head: DraftHead, size: int) -> None:
        # One line a tree, to allocate for the largest.
        super().__init__(head, Schedule([Scheduled(1 + i, tree) for i, tree in enumerate(playback.measured)]), size)
        self.playback, self.planted = playback, PlantedBatch(playback)
        largest = max(self.traits.max_nodes, self.planted.traits.max_nodes)
        self.traits = self.traits._replace(max_nodes=largest)

    def start_sequence(self, slot: int, token: list[int], features: TargetOutput) -> None:
        """Begin a text."""
        super().start_sequence(slot, token, features)
        self.planted.start_sequence(slot, token, features)

    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move a text."""
        super().move(from_slot, slot, length)
        self.planted.move(from_slot, slot, length)

    def begin(self, contexts: Sequence[Context | None], longest: int) -> DraftPlan:
        """Choose the head's tree, and the depth of the planted ones."""
        self.policy = next(self.playback.next_tree)
        plan = self.planted.begin(contexts, longest)
        self.chain = plan.chain
        return plan._replace(max_nodes=self.traits.max_nodes)

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Time the head's trees, and return the planted ones."""
        playback = self.playback
        assert self.policy is not None
        start = playback.clock()
        super().draft_trees(roots, max_draft_depth, longest, allow_host_sync=allow_host_sync)
        playback.seconds[draft_key(self.policy)].append(playback.clock() - start)
        return self.planted.draft_trees(roots, max_draft_depth, longest, allow_host_sync=allow_host_sync)

    def commit(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Commit rows at once, timed."""
        start = self.playback.clock()
        super().extend(features, count)
        self.playback.commits[features.token.shape[1]].append(self.playback.clock() - start)

    def learn(self, slot: int, token: list[int], path: list[int], logits: Float[Tensor, "M V"] | None) -> None:
        """Move on in a text."""
        self.planted.learn(slot, token, path, logits)


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
        measured: the trees whose drafts are timed; none without a head.
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
        player.seconds.clear()
        player.commits.clear()
        left = ROUNDS * sum(text.generated for text in texts)
        for turn in itertools.count(1):
            for steps in itertools.islice(baseline, STRETCH):
                plain.append(sum(step.draft_s + step.verify_s + step.other_s for step in steps))
            for steps in itertools.islice(played, STRETCH):
                verify[player.size].append(sum(step.verify_s for step in steps))
                other[not player.drafts.chain][player.size].append(sum(step.other_s for step in steps))
                left -= sum(step.committed for step in steps)
            drafts = [player.seconds[key] for key in keys]
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
        draft=averages(player.seconds),
        commit=averages(player.commits) or {1: 0.0},
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
        running = batch.running
        batch.step()
        batch.release()
        yield [request.generation.steps[-1] for request in running]


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
