"""The teacher-forced tier: a head's acceptance along given text, with any tree, from one target pass.

A text runs through the target once. The acceptance of a static tree follows from the head's ranks of the text's tokens.
A tree that depends on the head's confidence is grown once at every token of the text, at full size; its scores give the
nodes of smaller depths and budgets. For sampled chains the acceptance probability of each token is computed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from data.text.prompts import Prompt
from eval.config import DecodingConfig, Selection
from eval.inputs.workloads import Text, Workload, check_known, of_answer, read_log
from eval.measures.metrics import SpecDecodingStats, count_passes, median_run
from eval.measures.results import TEACHER_FORCED, MeasuredRequest, ResultRow, result
from heads.base import Features, NewRows
from heads.common.progress import progress
from heads.common.typed import Json
from heads.modules.vocab import scatter_logits
from inference.decode import Generation, RequestParams, autoregress
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import BY_CONFIDENCE, TreeConfig, by_confidence
from inference.protocol import Drafter, DraftInputs
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling, distribution
from inference.verification.tree import DraftTree

Statistics = Json  # a head's in report.json
Rates = Float[Tensor, "D K"]  # the acceptance by depth, from 1, and rank, from 0
RANKS = 10  # ranks of a depth's guesses that are counted separately
TINY = 1e-30  # minimum divisor of a probability
FIXED = 16  # a head with at most this many depths unrolls all, since some heads support nothing else


@dataclass(frozen=True)
class TreeAcceptance:
    """The number of tokens that a grown tree accepts under every smaller depth and budget."""

    needed: list[list[int]]  # needed[d][j]: budget at which a tree of depth d accepts j + 1 tokens
    size: list[int]  # size[d]: number of nodes that a tree of depth d drafts before it is cut


NO_TREE = TreeAcceptance([[]], [0])  # for a token without a tree


@dataclass(frozen=True)
class RankedText:
    """A text with a head's ranking at each token after which a step may begin."""

    text: Text
    rank: list[list[int]]  # [t][d]: rank of the text's token among the head's guesses at depth d; negative past the end
    grown: dict[str, list[TreeAcceptance]]  # `growth_key` -> one tree per token


@torch.inference_mode()
def rank_text(
    target: Target,
    head: Any,
    text: Text,
    largest: Sequence[TreeConfig],
    depth: int,
    *,
    sampling: Sampling = GREEDY,
    steps_alone: bool = False,
) -> RankedText:
    """Run a text that the target wrote through target and head once, ranking `depth` depths.

    `largest` are the trees to grow at every token, one of each kind with the greatest depth and budget, none for static
    shapes; they grow as under `sampling` without noise. With `steps_alone` a single tree grows, where its steps begin.
    """
    depth = min(depth, head.max_depth)
    token, features, logits = unrolled(target, head, text, depth)
    rank = torch.stack([ranks(guess, token[text.start - 1 :], d) for d, guess in enumerate(logits, 1)], 1)
    grown: dict[str, list[TreeAcceptance]] = {growth_key(tree): [] for tree in largest}
    state, done, root = None, 0, text.start
    while largest and root < len(text.token) - 1:  # earlier positions are committed
        following = token[None, done + 1 : root + 1]
        hidden, last = features.hidden[:, done:root], features.last_hidden[:, done:root]
        rows = Features(following, hidden, last, torch.zeros_like(following))
        state, level = head.extend(state, NewRows(rows, following))
        roots = DraftInputs(token[None, root : root + 1], sampling, None)
        done = root
        for tree in largest:
            tokens = text.token[root + 1 : root + 1 + depth]
            growth, score = by_confidence(head, state, level, tree, roots, depth)
            built = DraftTree(*(row[0] for row in growth.build()))
            grown[growth_key(tree)].append(tree_acceptance(built, score[0], tokens, min(depth, tree.depth)))
        root += 1
        if steps_alone:
            accepted = accepted_of(grown[growth_key(tree)][-1], tree, text.limit - (root - text.start) - 1)[0]
            grown[growth_key(tree)] += [NO_TREE] * accepted
            root += accepted
    return RankedText(text, rank[: text.generated - 1].tolist(), grown)


def unrolled(target: Target, head: Any, text: Text, depth: int) -> tuple[Tensor, Features, Iterator[Tensor]]:
    """Run a text through target and head once; return its tokens (T,), the target's features, and the head's logits.

    For each depth these are the logits (T', V) from the row on whose root is the answer's first token.
    """
    token = torch.tensor(text.token, device=target.device)
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    drafts = head.unroll(features, head.max_depth if head.max_depth <= FIXED else depth)[:depth]
    states = (draft.state[0, text.start - 1 :] for draft in drafts)
    logits = (scatter_logits(head.vocab, head.compute_logits(state, d)) for d, state in enumerate(states, 1))
    return token, features, logits


def growth_key(tree: TreeConfig) -> str:
    """Return the key shared by all trees that are cut from the same larger tree."""
    return f"{tree.kind} {tree.top_k}" if tree.kind == "dynamic" else tree.kind


def ranks(logits: Float[Tensor, "T V"], token: Int[Tensor, "T"], depth: int) -> Int[Tensor, "T"]:
    """Return the rank of token t+1+d in row t's logits at depth d, -1 after the end.

    Among equal logits, which are frequent in bf16, the lower token id ranks first, as in a draft.
    """
    count = len(token) - 1 - depth
    rank = torch.full_like(token, -1)
    if count > 0:
        guess, following = logits[:count], token[depth + 1 :, None]
        actual, ids = guess.gather(1, following), torch.arange(guess.shape[1], device=guess.device)
        rank[:count] = ((guess > actual) | ((guess == actual) & (ids < following))).sum(1)
    return rank


def tree_acceptance(tree: DraftTree, score: Float[Tensor, "N"], following: Sequence[int], depth: int) -> TreeAcceptance:
    """Return the accepted tokens of a tree under every smaller depth and budget, given the next tokens.

    A budget keeps the best nodes, the earlier among ties, as `inference.verification.tree.best_n` does.
    """
    level, at = [0], 0
    path: list[int] = []
    token, parent = tree.token.tolist(), tree.parent.tolist()
    for node in range(1, len(token)):
        level.append(level[parent[node]] + 1)
        if parent[node] == at and len(path) < len(following) and token[node] == following[len(path)]:
            path.append(node)
            at = node
    depths = torch.tensor(level)
    values = score.cpu()
    index = torch.arange(len(token))
    better = []  # better[j][d]: nodes of depth up to d that are kept before the path's j-th
    for node in path:
        first = (values > values[node]) | ((values == values[node]) & (index < node))
        first[0] = False
        better.append(torch.bincount(depths[first], minlength=depth + 1).cumsum(0).tolist())
    needed = [[count[d] + 1 for count in better[:d]] for d in range(depth + 1)]
    return TreeAcceptance(needed, (torch.bincount(depths, minlength=depth + 1).cumsum(0) - 1).tolist())


def accepted_of(grown: TreeAcceptance, tree: TreeConfig, max_depth: int) -> tuple[int, int]:
    """Return how many tokens a grown tree accepts within its budget and `max_depth`, and how many it drafts."""
    depth = max(0, min(max_depth, tree.depth, len(grown.size) - 1))
    return sum(need <= tree.nodes for need in grown.needed[depth]), min(tree.nodes, grown.size[depth])


def replay(of: RankedText, tree: TreeConfig) -> list[tuple[int, int]]:
    """Return each step's drafted nodes and accepted tokens in decoding the text with a tree within the grown one."""
    text, steps, written = of.text, [], 1
    shape = [] if tree.kind in BY_CONFIDENCE else tree.shape()
    while written < text.generated:
        max_depth = text.limit - written - 1
        if tree.kind in BY_CONFIDENCE:
            accepted, nodes = accepted_of(of.grown[growth_key(tree)][written - 1], tree, max_depth)
        else:
            fitting, rank = {path for path in shape if len(path) <= max_depth}, of.rank[written - 1]
            accepted, nodes = 0, len(fitting)
            while accepted < len(rank) and tuple(rank[: accepted + 1]) in fitting:
                accepted += 1
        accepted = min(accepted, text.generated - written)
        steps.append((nodes, accepted))
        written += accepted + 1
    return steps


def passes_along(of: RankedText, tree: TreeConfig) -> SpecDecodingStats:
    """Return the counts of decoding the text with a tree."""
    steps = replay(of, tree)
    return count_passes([accepted for _, accepted in steps], sum(nodes for nodes, _ in steps), of.text.generated - 1)


@dataclass(frozen=True)
class Overlap:
    """The overlap of a head's probs q and the target's p along a text that the target sampled.

    Attributes:
        accept_prob: min(1, q(x) / p(x)) of the text's token x, for each token after which a step may begin, by depth; 0
            after the text's last token, and for a token of foreign text with p(x) = 0.
        common: the sum of min(p, q), the acceptance rate of drafts sampled from q; NaN after the text's last token.
    """

    text: Text
    accept_prob: Float[Tensor, "T D"]
    common: Float[Tensor, "T D"]


@torch.inference_mode()
def overlap(target: Target, head: Any, text: Text, sampling: Sampling, depth: int) -> Overlap:
    """Run a text through target and head once; return the overlap of their probs.

    Given that the target emitted x, x was an accepted draft with probability min(1, q(x) / p(x)): x is drafted with
    probability q(x) and accepted with min(1, p(x) / q(x)), so both happen with min(p(x), q(x)), and x is emitted with
    p(x) (Leviathan et al., arXiv 2211.17192, theorem 3.5, for each token).
    """
    token, features, logits = unrolled(target, head, text, depth)
    begin = text.start - 1
    probs = distribution(target.embeddings.logits(features.last_hidden[0, begin:]), sampling)
    ratio = probs.new_zeros(text.generated - 1, depth)
    common = torch.full_like(ratio, float("nan"))
    for d, guess in enumerate(logits, 1):
        count = text.generated - d
        if count < 1:
            break
        q = distribution(guess[:count], sampling)
        p = probs[d : d + count]
        x = token[begin + d + 1 : begin + d + 1 + count, None]
        qx, px = (dist.gather(1, x)[:, 0] for dist in (q, p))
        ratio[:count, d - 1] = torch.where(px > 0, qx / px.clamp_min(TINY), 0.0).clamp_max(1)
        common[:count, d - 1] = torch.minimum(p, q).sum(1)
    return Overlap(text, ratio, common)


def expected(of: Overlap, depth: int) -> SpecDecodingStats:
    """Return the expected passes of decoding the text with sampled chains, verified token by token.

    The target's tokens do not depend on the drafts, so along its text each draft is accepted with its `accept_prob`,
    and the positions where steps begin form a Markov chain: expectations are summed without sampling.
    """
    text = of.text
    depth = min(depth, of.accept_prob.shape[1])
    begins = [0.0] * (text.generated + 1)  # [t]: probability that a step begins at token t
    begins[1] = 1.0
    reached = [0.0] * depth
    drafted = 0.0
    for written in range(1, text.generated):
        begin = begins[written]
        tree_depth = max(0, min(depth, text.limit - written - 1))
        drafted += begin * tree_depth
        survive = 1.0
        for d in range(tree_depth + 1):
            accept = float(of.accept_prob[written - 1, d]) if d < tree_depth else 0.0
            begins[min(written + d + 1, text.generated)] += begin * survive * (1 - accept)
            survive *= accept
            if d < tree_depth:
                reached[d] += begin * survive
    steps = sum(begins[1 : text.generated], 0.0)
    return SpecDecodingStats(float(text.generated - 1), steps, drafted, math.fsum(reached), reached)


class WorkloadTexts(NamedTuple):
    """The texts of a workload at one temperature, in order."""

    workload: Workload[Any]
    temperature: float
    texts: list[Text]


def answered_texts(
    workload: Workload[Prompt], target: Target, params: RequestParams, runs: Sequence[Sequence[Generation]]
) -> WorkloadTexts:
    """Return the texts of autoregressive decoding, given all repeats of each prompt."""
    texts = [
        of_answer(target, prompt.token, median_run(repeats).tokens, params)
        for prompt, repeats in zip(workload.prompts, runs, strict=True)
    ]
    return WorkloadTexts(workload, params.sampling.temperature, texts)


def generate_answers(
    config: DecodingConfig, target: Target, workloads: Sequence[Workload[Prompt]]
) -> list[WorkloadTexts]:
    """Let the target answer the prompts at every temperature."""
    texts_of = []
    for workload, temperature in product(workloads, config.temperature):
        params, prompts = config.params(temperature), progress(workload.prompts, "writing the texts")
        runs = [[autoregress(target, prompt.token, params)] for prompt in prompts]
        texts_of.append(answered_texts(workload, target, params, runs))
    return texts_of


def recorded_texts(
    selection: Selection, config: DecodingConfig, target: Target, names: Sequence[str]
) -> list[WorkloadTexts]:
    """Return a log's answers, the same for every temperature; refuse logs without answers, or beyond the context."""
    texts_of = []
    for name in names:
        workload = read_log(name, target, selection, config.max_new_tokens)
        texts = [within_context(text, id_, name, target, selection.truncate) for id_, _, text in workload.prompts]
        texts_of += [WorkloadTexts(workload, temperature, texts) for temperature in config.temperature]
    return texts_of


def within_context(text: Text, id_: str, name: str, target: Target, truncate: bool) -> Text:
    """Return a text within the target's context, with the limit of tokens that decoding would have had.

    Refuse unknown tokens, and a text that is too long and must not be shortened.
    """
    check_known(text.token, f"workload {name}, record {id_}", target)
    over = max(len(text.token) - target.max_model_len, 0)
    if over and (not truncate or over >= text.start):
        raise ValueError(
            f"workload {name}, record {id_}: {len(text.token)} tokens with its answer, but the target's context is "
            f"{target.max_model_len}: give a smaller max_new_tokens, or truncate=true to keep each text's end"
        )
    start = text.start - over
    return Text(text.token[over:], start, min(text.limit, target.max_model_len - start))


def teacher_forced_rows(
    config: DecodingConfig, target: Target, drafters: Mapping[str, Drafter], texts_of: Sequence[WorkloadTexts]
) -> tuple[list[ResultRow], Statistics]:
    """Return the rows of the heads along the texts, and the statistics of one pass over its first texts by head.

    A tree with sampled siblings has no row above temperature 0, since the text does not determine its nodes. `rank` is
    the share of tokens by depth and rank among a head's guesses; `n_alpha` the acceptance rate of depth n + 1 after n
    drafted states, given the text's tokens; `at_every_token` P(a >= k) of chains that begin after every token.
    """
    rows = []
    by_head: Statistics = {}
    for name, drafter in drafters.items():
        if not isinstance(drafter, HeadDrafter):
            continue
        head, tree = drafter.head, drafter.policy
        for workload, temperature, texts in texts_of:
            if temperature > 0 and tree.kind == "sampled":
                continue
            is_sampled = temperature > 0 and tree.kind == "chain"
            sampling, depth = config.sampling(temperature), min(head.max_depth, tree.tree_depth)
            grown = [tree] if tree.kind in BY_CONFIDENCE else []
            read = progress(texts, "drafting along the texts")
            records = [rank_text(target, head, text, grown, depth, sampling=sampling) for text in read]
            statistics = rank_statistics(records, depth)
            if is_sampled:
                overlaps = [overlap(target, head, text, sampling, depth) for text in progress(texts, "comparing probs")]
                counts = [expected(common, depth) for common in overlaps]
                statistics |= sampled_statistics(overlaps)
            else:
                counts = [passes_along(record, tree) for record in records]
            rule = "token" if is_sampled else "greedy" if temperature == 0 else "point_mass"
            measurement = workload.measurement(temperature, 1, config.seed, tier=TEACHER_FORCED)
            for subset in measurement.parts(len(counts)):
                requests = [MeasuredRequest(passes) for passes in subset.of(counts)]
                rows.append(result(name, rule, tree.label, subset, requests))
            by_head.setdefault(name, {"workload": workload.name, "temperature": temperature, **statistics})
    return rows, by_head


def acceptance(rank: Int[Tensor, "T D"], ranks: int) -> Rates:
    """Return the frequency of the first K = `ranks` ranks among the text's tokens, by depth.

    `rank` is the rank of the token d positions after the root among the head's guesses; negative past the end.
    """
    counts = torch.stack([(rank == k).sum(0) for k in range(ranks)], 1).double()
    return counts / (rank >= 0).sum(0).clamp_min(1)[:, None]


def rank_statistics(records: Sequence[RankedText], depth: int) -> Statistics:
    """Return the acceptance by depth and rank, by depth at rank 0, and of whole chains."""
    rank = torch.tensor([row for record in records for row in record.rank], dtype=torch.long).view(-1, depth)
    rates, reached = acceptance(rank, RANKS), (rank == 0).long().cumprod(1).double()
    return {
        "tokens": len(rank),
        "rank": rates.tolist(),
        "n_alpha": rates[:, 0].tolist(),
        "at_every_token": (reached.sum(0) / (rank >= 0).sum(0).clamp_min(1)).tolist(),
    }


def sampled_statistics(overlaps: Sequence[Overlap]) -> Statistics:
    """Return n_alpha, and P(a >= k) of chains after every token, for drafts sampled from the head's probs."""
    common = torch.cat([overlap.common for overlap in overlaps]).double()
    finite = common.isfinite()
    reached = torch.cat([overlap.accept_prob for overlap in overlaps]).double().cumprod(1)
    count = finite.sum(0).clamp_min(1)
    return {
        "n_alpha": (common.nan_to_num(0.0).sum(0) / count).tolist(),
        "at_every_token": ((reached * finite).sum(0) / count).tolist(),
    }
