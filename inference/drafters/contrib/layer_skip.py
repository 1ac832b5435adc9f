"""The target drafts without some layers: Draft & Verify (arXiv 2309.08168), SWIFT (arXiv 2410.06916), LayerSkip.

The drafted rows see the committed ones in the target's own cache; their keys and values are dropped before verification
writes its own. Which attention and MLP sub-layers are skipped, a search on the user's prompts finds. It rates a
candidate without decoding: the drafts that it would make are read off recorded greedy answers in one pass, all
positions at once, and a drafted token costs what is left of the weights that decoding reads.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heads.base import LevelNodes, LevelOutput
from heads.common.ranges import LARGEST, Count, Decay, Within
from heads.common.typed import typed
from heads.common.untrusted import parse_json, regular
from heads.formats.store import TargetSpec
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import Context, Proposal, sampled_chain
from inference.target.cache import TargetCache
from inference.target.stack import Parts, Skips
from inference.target.target import Target
from inference.verification.sample import distribution
from inference.verification.tree import root

FORMAT = 1


class Text(NamedTuple):
    """A prompt with the target's greedy answer: all tokens, how many are the prompt's, and the target's cached rows."""

    token: list[int]
    prompt: int
    cache: TargetCache


class Rating(NamedTuple):
    """What a set of skips promises at its best depth: tokens per pass, the draft's cost, speed against the baseline.

    `cost` is that of a drafted token in target passes. `speed` takes a verification pass to cost what a plain one does.
    """

    speed: float
    depth: int
    tau: float
    cost: float


@dataclass(frozen=True)
class SearchSettings:
    """The greatest depth and the confidence to draft on with, how many candidates to rate, and the order's seed."""

    depth: Count
    stop: Decay  # 0: draft on whatever the confidence
    evaluations: Annotated[int, Within(2, LARGEST)]
    seed: int


@dataclass(frozen=True)
class SkipFile:
    """What is kept of a search: the target, the skipped sub-layers, how to draft with them, and what was measured."""

    format: int
    target: TargetSpec
    attention: list[int]
    mlp: list[int]
    depth: Count
    stop: Decay
    found: dict[str, float]

    @property
    def skips(self) -> Skips:
        """The sub-layers to leave out."""
        return Skips(tuple(self.attention), tuple(self.mlp))


def record(target: Target, prompt: list[int], answer: list[int]) -> Text:
    """Return a text with its rows in a cache, which `rate` reads again and again."""
    cache = target.cache()
    token = prompt + answer
    target.prefill(torch.tensor(token, device=target.device), cache)
    return Text(token, len(prompt), cache)


def forecast(parts: Parts, skips: Skips, text: Text) -> tuple[list[bool], list[float]]:
    """Return for each token of an answer whether it is what the draft makes of the text before, and how sure it is.

    One pass: a copy of each row runs through the thinned layers and sees the full rows before it and itself, as the
    first row of a draft does. Deeper drafts also see drafted rows; that they do no worse is what `rate` assumes.
    """
    size = len(text.token)
    device = parts.target.device
    position = torch.arange(text.prompt - 1, size - 1, device=device)
    before = torch.arange(size, device=device) < position[:, None]
    attn_mask = torch.cat([before, torch.eye(len(position), dtype=torch.bool, device=device)], 1)
    token = torch.tensor(text.token, device=device)
    probs = parts.run_skipping(skips, token[position], position, attn_mask, text.cache).float().softmax(-1)
    text.cache.keep(size, [])
    sure, drafted = probs.max(-1)
    return (drafted == token[position + 1]).tolist(), sure.tolist()


def rate(parts: Parts, skips: Skips, texts: list[Text], settings: SearchSettings) -> Rating:
    """Rate a set of skips at the best depth, by playing the recorded answers through."""
    cost = drafting_cost(parts, skips)
    seen = [forecast(parts, skips, text) for text in texts]
    ratings = []
    for depth in range(1, settings.depth + 1):
        played = [play(right, sure, depth, settings.stop) for right, sure in seen]
        tokens, passes, drafted = (sum(column) for column in zip(*played, strict=True))
        ratings.append(Rating(tokens / (passes + drafted * cost), depth, tokens / passes, cost))
    return max(ratings)


def play(right: list[bool], sure: list[float], depth: int, stop: float) -> tuple[int, int, int]:
    """Return the tokens, the target passes and the drafted tokens of an answer; a draft ends after an unsure token."""
    row = passes = drafted = 0
    while row < len(right):
        ahead = range(row, min(row + depth, len(right)))
        length = next((i + 1 - row for i in ahead if sure[i] < stop), len(ahead))
        accepted = next((i - row for i in ahead[:length] if not right[i]), length)
        passes, drafted, row = passes + 1, drafted + length, row + accepted + 1
    return min(row, len(right)), passes, drafted


def drafting_cost(parts: Parts, skips: Skips) -> float:
    """Return a drafted token's cost in target passes: the share of the weights, lm_head included, that it reads."""
    sizes = parts.sizes()
    lm_head = parts.target.embeddings.lm_head_weight().numel()
    total = lm_head + sum(attention + mlp for attention, mlp in sizes)
    saved = sum(sizes[i][0] for i in skips.attention) + sum(sizes[i][1] for i in skips.mlp)
    return (total - saved) / total


def search(parts: Parts, texts: list[Text], settings: SearchSettings) -> tuple[Skips, Rating]:
    """Return the best set of skips found, and its rating; a bit of `hill_climb` is a sub-layer."""
    layers = len(parts.layers)

    def skips(bits: frozenset[int]) -> Skips:
        attention, mlp = (tuple(i for i in range(layers) if i + first in bits) for first in (0, layers))
        return Skips(attention, mlp)

    bits, rating = hill_climb(lambda bits: rate(parts, skips(bits), texts, settings), 2 * layers, settings)
    return skips(bits), rating


def hill_climb(
    score: Callable[[frozenset[int]], Rating], size: int, settings: SearchSettings
) -> tuple[frozenset[int], Rating]:
    """Search sets of numbers below `size` for the best score; every set is scored once, `evaluations` sets at most.

    A local search: from a start, the empty set at first, flip bits in random order and keep what rates better, until a
    whole round changes nothing; then start again at random.
    """
    order, start = random.Random(settings.seed), frozenset[int]()
    ratings: dict[frozenset[int], Rating] = {}

    def rated(bits: frozenset[int]) -> Rating:
        if bits not in ratings and len(ratings) < settings.evaluations:
            ratings[bits] = score(bits)
        return ratings.get(bits, Rating(0.0, 0, 0.0, 0.0))

    while len(ratings) < min(settings.evaluations, 2**size):
        improved = True
        while improved:
            improved = False
            for bit in order.sample(range(size), size):
                if rated(start) < rated(start ^ {bit}):
                    start, improved = start ^ {bit}, True
        share = order.random()
        start = frozenset(bit for bit in range(size) if order.random() < share)
    return max(ratings.items(), key=lambda item: item[1])


def save_skips(path: Path, content: SkipFile) -> None:
    """Write the file of a search."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(content), indent=2) + "\n", encoding="utf-8")


def load_skips(path: Path, target: Target) -> SkipFile:
    """Read the file of a search; refuse a missing or damaged one, and another target's."""
    remedy = "search again with eval/search_skips.py"
    try:
        skip_file = typed(SkipFile, parse_json(regular(path).read_bytes()))
    except OSError:
        raise ValueError(f"{path}: no such file; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); {remedy}") from None
    if skip_file.format != FORMAT:
        raise ValueError(f"{path}: not a file of skipped sub-layers that this version reads; {remedy}")
    if skip_file.target.fingerprint != target.spec.fingerprint:
        raise ValueError(
            f"{path}: its sub-layers are those of another target, {skip_file.target.name}, not of {target.name}; "
            f"{remedy}"
        )
    if beyond := [i for i in (*skip_file.attention, *skip_file.mlp) if not 0 <= i < target.spec.num_layers]:
        raise ValueError(f"{path}: it skips layer {beyond[0]} of {target.spec.num_layers}, counted from 0; {remedy}")
    return skip_file


class Thinned:
    """One step's drafted rows behind the committed ones in the target's cache; a tree grows from it as from a head."""

    vocab = None

    def __init__(self, parts: Parts, skips: Skips, context: Context) -> None:
        assert context.cache is not None
        self.parts, self.skips, self.cache, self.max_depth = parts, skips, context.cache, context.max_draft_depth
        self.last, self.prefix = context.token[-1], context.cache.length
        self.position = torch.arange(self.prefix, device=parts.target.device)  # of all cached rows

    def root(self) -> LevelOutput:
        """Run the root."""
        token = torch.tensor([self.last], device=self.position.device)
        return self.run(token, 0, token.new_ones(1, 1, dtype=torch.bool))

    def expand(self, state: None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Run the next tree level; every node sees the root besides what its mask says."""
        mask = nodes.mask[0]
        return self.run(nodes.token[0], nodes.depth, torch.cat([mask.new_ones(len(mask), 1), mask], 1))

    def run(self, token: Int[Tensor, "N"], depth: int, attn_mask: Bool[Tensor, "N M"]) -> LevelOutput:
        """Run rows of a depth, given which of the M drafted rows so far each sees."""
        position = torch.full_like(token, self.prefix + depth)
        self.position = torch.cat([self.position, position])
        seen = torch.cat([attn_mask.new_ones(len(attn_mask), self.prefix), attn_mask], 1)
        logits = self.parts.run_skipping(self.skips, token, position, seen, self.cache, self.position)
        return LevelOutput(logits[None], logits[None, :, :0])

    def drop(self) -> None:
        """Drop the drafted rows."""
        self.cache.keep(self.prefix, [])


class LayerSkip(HostDrafter, DrafterState):
    """Drafts a chain, above temperature 0 sampled from the thinned target's probs; its state is the target's cache."""

    @dataclass(frozen=True)
    class Config:
        """The file that the search wrote, and what differs from its depth and stop; None differs in nothing."""

        skips: str | None
        depth: Count | None
        stop: Decay | None

        def __post_init__(self) -> None:
            if not self.skips:
                raise ValueError("drafter.layer_skip.skips is missing: give the file that eval/search_skips.py writes")

    def __init__(self, config: Config, target: Target, name: str) -> None:
        file = load_skips(Path(config.skips or "").expanduser(), target)
        self.parts, self.name, self.skips = target.parts, name, file.skips
        self.depth = file.depth if config.depth is None else config.depth
        self.stop = file.stop if config.stop is None else config.stop
        self.tree = f"chain-{self.depth}"

    def start(self, prompt: list[int]) -> "LayerSkip":
        """Return the state of any sequence: none of its own."""
        return self

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Draft a chain; it ends after a token that is less probable than `stop`, never instead of it."""
        depth, token, q = min(self.depth, context.max_draft_depth), context.token[-1:], list[Tensor]()
        if not depth:
            return sampled_chain(token, q)
        drafting = Thinned(self.parts, self.skips, context)
        level = drafting.root()
        while True:
            q.append(distribution(level.logits[0], context.sampling))
            token.append(context.draws.token(q[-1], len(q)))
            if len(q) == depth or float(level.logits[0, 0].float().softmax(-1)[token[-1]]) < self.stop:
                break
            last = torch.tensor([token[-1:]], device=level.logits.device)
            level = drafting.expand(None, level, LevelNodes(last, last, last.new_ones(1, 1, len(q)).bool(), len(q)))
        drafting.drop()
        return sampled_chain(token, q)


class EarlyExit(HostDrafter, DrafterState):
    """LayerSkip (Elhoushi et al., arXiv 2404.16710): the first layers draft, with the final norm and the lm_head.

    Lossless for every target; one that was not trained to exit early is rarely followed.
    """

    @dataclass(frozen=True)
    class Config:
        """How many layers draft, and the tree they grow."""

        exit_layer: Count
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str) -> None:
        depth = len(target.decoder_layers)
        if config.exit_layer >= depth:
            raise ValueError(
                f"drafter.early_exit.exit_layer is {config.exit_layer}, but {target.name} has {depth} layers: "
                f"give 1 to {depth - 1}"
            )
        rest = tuple(range(config.exit_layer, depth))
        self.parts, self.skips, self.config, self.name = target.parts, Skips(rest, rest), config, name
        self.tree = config.tree.label

    def start(self, prompt: list[int]) -> "EarlyExit":
        """Return the state of any sequence: none of its own."""
        return self

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Grow the tree."""
        if context.max_draft_depth < 1:
            return Proposal(root(context.token[-1], self.parts.target.device))
        drafting = Thinned(self.parts, self.skips, context)
        proposal = grow(drafting, None, drafting.root(), self.config.tree, context)
        drafting.drop()
        return proposal
