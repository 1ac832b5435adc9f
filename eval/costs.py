"""What the parts of a decoding step cost on this device, measured inside the engine.

A draft source plays a recorded text back to the engine: the trees that it hands over have the sizes to be measured and
hold as many of the text's tokens as are to be accepted, and before each it times a proposal that it then throws away.
So every part is timed between the others, as in decoding: a loop over one part alone finds its weights still in the
processor's cache, and reports less than the part costs.
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from eval.machine import synchronize
from eval.replay import Text
from inference.decode import Settings, autoregress, speculate
from inference.drafters import Commit, Context, Proposal
from inference.drafters.head import HeadDrafter
from inference.policy import TreeConfig
from inference.target import Target
from inference.tree import DraftTree
from inference.tuner import Costs, between, draft_key, rising

ROUNDS = 20  # over the texts, at most: what is rare in them is then left as it is
Samples = defaultdict[int, list[float]]
T = TypeVar("T")


class Playback:
    """Times a head's proposals and commits, and drafts trees of given sizes that hold a recorded text's tokens.

    Attributes:
        text: the text that is decoded.
        draft: seconds of a proposal, by the tree's `draft_key`.
        commit: seconds of the head's pass over committed rows, by their number.
    """

    name, tree = "playback", "playback"

    def __init__(
        self, target: Target, head: HeadDrafter, measured: Sequence[TreeConfig], sizes: Sequence[int], seed: int
    ) -> None:
        self.target, self.head = target, head
        self.feature_layers = head.feature_layers
        shuffle = random.Random(seed)
        deepest = max(tree.deepest for tree in measured)
        self.next_tree = rotation(measured, shuffle)
        self.next_size, self.next_accepted = rotation(sizes, shuffle), rotation(range(deepest + 1), shuffle)
        self.text = Text([], 0, 0)
        self.draft: defaultdict[str, list[float]] = defaultdict(list)
        self.commit: Samples = defaultdict(list)

    def reset(self, prompt: list[int]) -> None:
        """Begin a new sequence."""
        self.head.reset(prompt)

    def forget(self) -> None:
        """Nothing outlives a sequence but the samples."""

    def observe(self, commit: Commit) -> None:
        """Let the head commit rows, timed unless they are a prompt's."""
        start = self.clock()
        self.head.observe(commit)
        if commit.verified is not None:
            self.commit[len(commit.token)].append(self.clock() - start)

    def propose(self, context: Context) -> Proposal:
        """Time one of the head's trees, and hand over one of the sizes to be measured."""
        self.head.config = next(self.next_tree)
        start = self.clock()
        self.head.propose(context._replace(room=self.head.config.deepest))
        self.draft[draft_key(self.head.config)].append(self.clock() - start)
        following = self.text.token[len(context.token) :][: max(context.room, 0)]
        accepted, size = next(self.next_accepted), next(self.next_size)
        if context.room < 1 or not self.target.takes_trees:  # a node of a chain lies deep
            size = min(size, max(context.room, 0))
        return Proposal(planted(context.token[-1], following[: min(accepted, size)], size, self.target))

    def clock(self) -> float:
        """Return seconds, after the device has finished what it was given."""
        synchronize(self.target.device)
        return time.perf_counter()


def planted(root: int, tokens: Sequence[int], size: int, target: Target) -> DraftTree:
    """Return a tree of `size` drafted nodes, level by level, that holds these tokens as a path of first children.

    All other nodes are wrong: siblings of the tokens, or behind them if the target takes chains alone.
    """
    vocabulary, device = target.ends.vocab_size, target.device
    token, parent = [root], [-1]
    levels = max(len(tokens), 1)
    spare = size - len(tokens)
    above = 0
    for level in range(levels):
        right = list(tokens[level : level + 1])
        wrong = spare // levels + (level < spare % levels) if target.takes_trees else 0
        first = right[0] if right else token[above]
        row = right + [(first + 1 + i) % vocabulary for i in range(wrong)]
        token += row
        parent += [above] * len(row)
        above = len(token) - len(row)
    while len(token) <= size:
        parent.append(len(token) - 1)
        token.append((token[-1] + 1) % vocabulary)
    return DraftTree(torch.tensor(token, device=device), torch.tensor(parent, device=device))


def measure(
    target: Target,
    head: HeadDrafter,
    texts: Sequence[Text],
    measured: Sequence[TreeConfig],
    sizes: Sequence[int],
    samples: int,
    settings: Settings,
) -> Costs:
    """Measure the costs on recorded texts, plain decoding and playback in turn, one sequence at a time.

    Args:
        target: the target that wrote them.
        head: the draft head as a draft source; its tree is overwritten.
        texts: what is decoded again.
        measured: the trees whose proposals are timed.
        sizes: the drafted nodes whose verification is timed; 0 is plain decoding's pass.
        samples: how often each at least.
        settings: those that the texts were written under.
    """
    playback = Playback(target, head, measured, sizes, settings.seed)
    verify: Samples = defaultdict(list)
    settle: tuple[Samples, Samples] = (defaultdict(list), defaultdict(list))
    plain: list[float] = []
    wanted = {draft_key(tree) for tree in measured}
    for round_ in range(ROUNDS + 1):
        for text in texts:
            prompt, playback.text = text.token[: text.start], text
            alone = autoregress(target, prompt, settings)
            made = speculate(target, playback, prompt, settings)
            if round_ == 0:  # what the first calls of everything cost is not what later ones do
                playback.draft.clear()
                playback.commit.clear()
                break
            plain += [step.draft_s + step.verify_s + step.other_s for step in alone.steps]
            for step in made.steps:
                verify[step.drafted].append(step.verify_s)
                settle[step.accepted > 1][step.drafted].append(step.other_s)
        scarce = [playback.draft[key] for key in wanted] + [verify[size] for size in sizes]
        if round_ > 0 and min(map(len, scarce)) >= samples:
            break
    straight, gaps = ({size: typical(each) for size, each in one.items()} for one in settle)
    return Costs(
        batch=1,
        plain=typical(plain),
        verify=rising({size: typical(each) for size, each in verify.items()}),
        settle=(straight, gaps or straight),
        draft={key: typical(each) for key, each in playback.draft.items()},
        commit={rows: typical(each) for rows, each in playback.commit.items()},
    )


@torch.inference_mode()
def verification(
    target: Target, sizes: Sequence[int], contexts: Sequence[int], samples: int, seed: int
) -> dict[int, dict[int, float]]:
    """Return the seconds of a verification pass by tokens of context, then by drafted nodes, sizes in turn.

    Contexts that leave no room for the largest tree are left out. The committed rows are those of random tokens.
    """
    shuffle, found = random.Random(seed), {}
    vocabulary = target.ends.vocab_size
    target.feature_layers = ()
    for context in contexts:
        if context + max(sizes) + 1 > target.context:
            continue
        cache = target.cache()
        target.prefill(torch.tensor(shuffle.choices(range(vocabulary), k=context), device=target.device), cache)
        seconds: Samples = defaultdict(list)
        for turn in range(samples + 1):
            for size in shuffle.sample(list(sizes), len(sizes)):
                drafted = planted(0, [], size, target)
                synchronize(target.device)
                start = time.perf_counter()
                target.score(drafted, cache)
                synchronize(target.device)
                seconds[size] += [time.perf_counter() - start] if turn else []
                cache.keep(context, [])
        found[context] = rising({size: typical(each) for size, each in seconds.items()})
    return found


def at_context(costs: Costs, verify: Mapping[int, float]) -> Costs:
    """Return the costs with another context's verification pass, in plain decoding too."""
    plain = costs.plain - between(costs.verify, 0) + between(verify, 0)
    return Costs(costs.batch, plain, verify, costs.settle, costs.draft, costs.commit)


def typical(values: Sequence[float]) -> float:
    """Return the mean without the lowest and highest tenth.

    Decoding pays for interruptions, and a short part has few of them but long ones: a median would not see those, and
    price short parts too low. A single outlier must not price a tree either.
    """
    ordered = sorted(values)
    cut = len(ordered) // 10
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


def rotation(items: Sequence[T], shuffle: random.Random) -> Iterator[T]:
    """Yield all items in a random order, then again in another, without end."""
    while True:
        yield from shuffle.sample(list(items), len(items))
