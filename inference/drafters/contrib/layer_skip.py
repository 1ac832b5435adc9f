"""The target drafts without some layers: Draft & Verify (arXiv 2309.08168), SWIFT (arXiv 2410.06916), LayerSkip.

Drafted rows attend to the committed ones in the target's cache; their keys and values are dropped before verification
writes its own. A search on the user's prompts chooses the attention and MLP sub-layers to skip. It rates a candidate
without decoding: one pass over recorded greedy answers gives its drafts at all positions, and a drafted token costs the
share of the weights that it reads.
"""

import random
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from heads.base import LevelNodes, LevelOutput, Tokens
from heads.common.files import write_json
from heads.common.typed import LARGEST, Count, Decay, Within, typed
from heads.common.untrusted import parsed_file
from heads.formats.store import TargetSpec, assert_same_target
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import DEEPEST, TreeConfig, grow
from inference.protocol import DraftContext, Proposal
from inference.target.cache import TargetCache
from inference.target.model import LayerSkippedTarget, SkipSet
from inference.target.target import Target

FORMAT = 1
REMEDY = "search again with eval/search_skips.py"
Depth = Annotated[int, Within(1, DEEPEST)]
Text = tuple[Tensor, int, TargetCache]  # a prompt with the target's greedy answer, the prompt's length, its cached rows


class SelfDrafter(HostDrafter, DrafterState):
    """Drafts with the target without some layers, as a head drafts; its state is the target's cache."""

    vocab = None

    def __init__(self, target: Target, skips: SkipSet, tree: TreeConfig, name: str, least: float = 0.0) -> None:
        self.partial_target, self.config, self.name, self.least = LayerSkippedTarget(target, skips), tree, name, least
        self.tree = tree.label

    def start(self, prompt: Tokens) -> "SelfDrafter":
        """Return itself: no sequence has another state."""
        return self

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> Proposal:
        """Grow the tree with rows after those of the cache, and drop these rows."""
        assert context.cache is not None
        last = torch.tensor([context.token[-1:]], device=self.partial_target.target.device)
        self.cache, self.prefix, self.max_depth = context.cache, context.cache.length, context.max_draft_depth
        self.position = torch.arange(self.prefix, device=last.device)[None]  # the cached rows' positions
        level = self.expand(None, None, LevelNodes(last, last, last.new_zeros(1, 1, 0, dtype=torch.bool), 0))
        proposal = grow(self, None, level, self.config, context, self.least)
        self.cache.keep(self.prefix, [])
        return proposal

    def expand(self, state: None, level: LevelOutput | None, nodes: LevelNodes) -> LevelOutput:
        """Run the next tree level; every node attends to the root and to the nodes of its mask."""
        mask = nodes.mask[0]
        position = torch.full_like(nodes.token, self.prefix + nodes.depth)
        self.position = torch.cat([self.position, position], 1)
        seen = torch.cat([mask.new_ones(len(mask), self.prefix + 1), mask], 1)
        logits = self.partial_target.run(nodes.token[0], position[0], seen, self.cache, self.position)
        return LevelOutput(logits[None], logits[None, :, :0])


class EarlyExit(SelfDrafter):
    """LayerSkip (Elhoushi et al., arXiv 2404.16710): the first layers draft, with the final norm and the lm_head.

    Lossless for every target; one that was not trained to exit early rarely accepts a draft.
    """

    @dataclass(frozen=True)
    class Config:
        """The number of layers that draft, and the tree policy."""

        exit_layer: Count
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str) -> None:
        depth = len(target.decoder_layers)
        if config.exit_layer >= depth:
            raise ValueError(
                f"drafter.early_exit.exit_layer is {config.exit_layer}: of {target.name}'s layers give 1 to {depth - 1}"
            )
        rest = tuple(range(config.exit_layer, depth))
        super().__init__(target, SkipSet(rest, rest), config.tree, name)


@dataclass(frozen=True)
class SkipFile:
    """The file of a search: the target, the skipped sub-layers, depth and stop of a draft, and the measurements."""

    format: Annotated[int, Within(FORMAT, FORMAT)]
    target: TargetSpec
    attention: list[int]
    mlp: list[int]
    depth: Depth
    stop: Decay
    found: dict[str, float]


def save_skips(path: Path, content: SkipFile) -> None:
    """Write the file of a search."""
    write_json(path, asdict(content))


class LayerSkip(SelfDrafter):
    """Drafts a chain without the sub-layers of a search; it ends after a token that is less probable than `stop`."""

    @dataclass(frozen=True)
    class Config:
        """The file of a search, and depth and stop in place of the file's; None keeps the file's."""

        skips: str
        depth: Depth | None
        stop: Decay | None

    def __init__(self, config: Config, target: Target, name: str) -> None:
        path = Path(config.skips).expanduser()
        file = typed(SkipFile, parsed_file(path, REMEDY), str(path))
        assert_same_target(path, file.target, target.spec)
        if unknown := {*file.attention, *file.mlp} - {*range(len(target.decoder_layers))}:
            raise ValueError(f"{path}: skips layer {min(unknown)}, which {target.name} has not; {REMEDY}")
        tree = TreeConfig("chain", config.depth or file.depth, 0, 0, [], [])
        stop = file.stop if config.stop is None else config.stop
        super().__init__(target, SkipSet(tuple(file.attention), tuple(file.mlp)), tree, name, stop)


class Rating(NamedTuple):
    """The estimate for a set of skips at its best depth: speedup, depth, tokens per pass, cost of a drafted token.

    `speed` assumes that a verification pass costs as much as a baseline pass.
    """

    speed: float
    depth: int
    tau: float
    cost: float


@dataclass(frozen=True)
class SearchSettings:
    """The greatest depth, the number of candidates to rate, and the random seed."""

    depth: Depth
    evaluations: Annotated[int, Within(2, LARGEST)]
    seed: int


def rate(target: Target, skips: SkipSet, texts: list[Text], tree_depth: int) -> Rating:
    """Rate a set of skips at the best depth, by its share of correct guesses (Leviathan et al., arXiv 2211.17192).

    One pass per text: a copy of each row runs through the remaining layers and attends to the full rows before it and
    to itself, as the first row of a draft does. Deeper drafts, which also attend to drafted rows, are assumed as good.
    """
    partial_target, correct, best = LayerSkippedTarget(target, skips), [], Rating(0.0, 0, 0.0, 0.0)
    for token, prompt, cache in texts:
        column = torch.arange(len(token), device=token.device)
        position = column[prompt - 1 : -1]
        itself = torch.eye(len(position), dtype=torch.bool, device=token.device)
        seen = torch.cat([column < position[:, None], itself], 1)
        correct.append(partial_target.run(token[position], position, seen, cache).argmax(-1) == token[position + 1])
        cache.keep(len(token), [])
    share = float(torch.cat(correct).double().mean())
    tau = 1.0
    for depth in range(1, tree_depth + 1):
        tau += share**depth
        best = max(best, Rating(tau / (1 + depth * partial_target.cost), depth, tau, partial_target.cost))
    return best


def recorded(target: Target, prompt: Tokens, answer: Tokens) -> Text:
    """Return a text with its prefilled cache, which `rate` reads many times."""
    token = torch.tensor(prompt + answer, device=target.device)
    cache = target.cache()
    target.prefill(token, cache)
    return token, len(prompt), cache


def search(target: Target, texts: list[Text], settings: SearchSettings) -> tuple[SkipSet, Rating]:
    """Return the best set of skips found, and its rating: random changes from the empty set on, if they rate better."""
    order = random.Random(settings.seed)
    best = SkipSet((), ())
    ratings = {best: rate(target, best, texts, settings.depth)}
    parts = [*product((0, 1), range(len(target.decoder_layers)))]  # attention and MLP of each layer
    for _ in range(settings.evaluations - 1):
        changed = order.sample(parts, order.choice((1, order.randint(1, len(parts)))))  # a small change, or a large one
        flips = ({layer for kind, layer in changed if kind == which} for which in (0, 1))
        skips = SkipSet(*(tuple(sorted({*old} ^ new)) for old, new in zip(best, flips, strict=True)))
        if skips not in ratings:
            ratings[skips] = rate(target, skips, texts, settings.depth)
            best = max(best, skips, key=ratings.__getitem__)
    return best, ratings[best]
