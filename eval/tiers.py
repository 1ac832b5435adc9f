"""The two tiers without a clock: heads along given texts, and sources that read text alone along a log.

All three tiers measure the same τ. What a lossless rule emits is the target's text whatever is drafted, so one text
serves for all sources: the one that plain decoding has just written, or one from a log.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eval.config import DecodingConfig, PromptsConfig, SourcesConfig, TunerConfig
from eval.explain import explained, price
from eval.inputs.states import in_states
from eval.inputs.texts import Text, of_answer
from eval.inputs.workloads import Selection, Workload, check_known, read_log
from eval.measures.builder import Request, Source, text_results
from eval.measures.metrics import Passes, counted, median_run
from eval.measures.results import REPLAY, TEACHER_FORCED, Row, Session
from eval.offline import replay
from eval.offline.teacher_forced import Overlap, Record, expected, overlap, record
from eval.offline.teacher_forced import replay as steps_of
from eval.tuning.simulated import simulate
from eval.tuning.static_tree import acceptance
from inference.decode import Generation, Settings, autoregress
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import CONFIDENT, TreeConfig
from inference.drafters.registry import make_reading, reads_text_alone
from inference.protocol import Drafter
from inference.target.target import Target
from inference.target.tokenizer import Reads
from inference.verification.sample import Sampling

RANKS = 10  # of a depth's guesses, that are told apart
DRAWN = ("chain", "sampled", "independent")  # the kinds of tree whose nodes are drawn above temperature 0


@dataclass(frozen=True)
class Material:
    """The texts of a workload at a temperature, in its order, and whether the target has just written them."""

    workload: Workload
    temperature: float
    texts: list[Text]
    own: bool

    def session(self, tier: str, seed: int) -> Session:
        """Return what its rows share."""
        of = self.workload
        return Session(
            of.name, self.temperature, 1, 0, seed, categories=of.categories(), conversations=of.conversations, tier=tier
        )


def answered(workload: Workload, target: Target, settings: Settings, runs: Sequence[Sequence[Generation]]) -> Material:
    """Return what plain decoding wrote, given the repeats of each prompt."""
    texts = [
        of_answer(target, prompt.token, median_run(each).tokens, settings)
        for prompt, each in zip(workload.prompts, runs, strict=True)
    ]
    return Material(workload, settings.sampling.temperature, texts, True)


def written(config: DecodingConfig, target: Target, workloads: Sequence[Workload]) -> list[Material]:
    """Let the target answer the prompts at every temperature."""
    made = []
    for workload in workloads:
        for temperature in config.temperatures():
            settings = config.settings(temperature)
            runs = [[autoregress(target, prompt.token, settings)] for prompt in workload.prompts]
            made.append(answered(workload, target, settings, runs))
    return made


def recorded(
    asked: PromptsConfig, config: DecodingConfig, reads: Reads | Target, names: Sequence[str]
) -> list[Material]:
    """Return the logs' own answers, for every temperature the same.

    Raises:
        ValueError: a log without answers, or one that a target's context cannot hold.
    """
    wanted = Selection(asked.prompts, 0, asked.truncate, asked.turns, asked.balanced)
    made = []
    for name in names:
        workload, texts = read_log(name, reads, wanted, config.max_new_tokens)
        if isinstance(reads, Target):
            texts = [
                within_context(text, prompt.id, name, reads, asked.truncate)
                for text, prompt in zip(texts, workload.prompts, strict=True)
            ]
        made += [Material(workload, temperature, texts, False) for temperature in config.temperatures()]
    return made


def within_context(text: Text, id_: str, name: str, target: Target, truncate: bool) -> Text:
    """Return a text that the target's context holds, with no more tokens allowed than decoding would have had there.

    Raises:
        ValueError: it does not, and may not be shortened; or it has tokens that the target does not know.
    """
    check_known(text.token, f"workload {name}, record {id_}", target)
    over = max(len(text.token) - target.context, 0)
    if over and (not truncate or over >= text.start):
        raise ValueError(
            f"workload {name}, record {id_}: {len(text.token)} tokens with its answer, but the target's context is "
            f"{target.context}: give a smaller max_new_tokens, or truncate=true to keep each text's end"
        )
    start = text.start - over
    return Text(text.token[over:], start, min(text.limit, target.context - start))


def replayed(config: SourcesConfig, seed: int, reads: Reads, materials: Sequence[Material]) -> list[Row]:
    """Return the rows of the sources that read text alone, warm and cold, within the budget."""
    given = {name: options for name, options in config.drafter.items() if reads_text_alone(name, options)}
    drafters = {name: make_reading(name, options, reads) for name, options in given.items()}
    sources = list(in_states(drafters, config.cold, config.budget).values())
    made: list[Row] = []
    for each in materials:
        if not each.own and each.temperature != materials[0].temperature:
            continue  # what was recorded is what it is
        made += replay.replayed(sources, each.texts, each.session(REPLAY, seed))
    return made


def forced(
    config: DecodingConfig, budget: int | None, target: Target, drafters: Mapping[str, Drafter],
    materials: Sequence[Material],
) -> tuple[list[Row], dict[str, Any]]:  # fmt: skip
    """Return the rows of the heads along the texts, and what else one pass over them says of each head.

    A tree whose siblings are drawn has no row above temperature 0: what its nodes were is not in the text.

    Returns:
        The rows; and by head, of its first texts: `rank`, the share of tokens by depth and rank among its guesses;
        `n_alpha`, the acceptance rate of depth n + 1 after n drafted states, given the text's tokens; `at_every_token`,
        P(a >= k) of a chain that begins after every token, where decoding begins some.
    """
    made: list[Row] = []
    found: dict[str, Any] = {}
    for name, drafter in heads_of(drafters).items():
        tree = drafter.policy if budget is None else within(drafter.policy, budget)
        for each in materials:
            drawn = each.temperature > 0 and tree.kind in DRAWN
            if drawn and tree.kind != "chain":
                continue
            if drawn:
                told, counts = _drawn(target, drafter.head, tree, each, config.sampling(each.temperature))
            else:
                told, counts = _chosen(target, drafter.head, tree, each)
            rule = "token" if drawn else "greedy" if each.temperature == 0 else "point_mass"
            session = each.session(TEACHER_FORCED, config.seed)
            made += text_results(Source(name, rule, tree.label), session, [Request(passes) for passes in counts])
            found.setdefault(name, {"workload": each.workload.name, "temperature": each.temperature, **told})
    return made, found


def other_trees(
    tuner: TunerConfig,
    config: DecodingConfig,
    target: Target,
    drafters: Mapping[str, Drafter],
    materials: Sequence[Material],
    priced: Collection[str],
) -> dict[str, Any]:
    """Return by head what other trees would give along the first greedy texts; those of `priced` heads have a price."""
    tuner = tuner.within(target.context)
    texts = next((each.texts for each in materials if each.own and each.temperature == 0), [])
    texts = [text for text in texts if text.made > 1]
    apart = -(-len(texts) // tuner.prompts) or 1
    found = {}
    for name, drafter in heads_of(drafters).items() if texts else ():
        trees = simulate(tuner, target, drafter, texts[::apart]).trees
        costs = price(tuner, config, target, drafter, trees, texts[::apart]) if name in priced else {}
        found[name] = explained(trees, costs)
    return found


def heads_of(drafters: Mapping[str, Drafter]) -> dict[str, HeadDrafter]:
    """Return the heads among the sources, without the budget that they may be within."""
    return {
        name: HeadDrafter(drafter.head, drafter.policy, name)
        for name, drafter in drafters.items()
        if drafter.head is not None and drafter.policy is not None
    }


def within(tree: TreeConfig, depth: int) -> TreeConfig:
    """Return a tree cut to a depth."""
    paths = [path for path in tree.paths if len(path) <= depth]
    return replace(tree, depth=min(tree.depth, depth), paths=paths, widths=tree.widths[:depth])


def _chosen(target: Target, head: Any, tree: TreeConfig, material: Material) -> tuple[dict[str, Any], list[Passes]]:
    """Return what is known of a head whose drafts are chosen by rank."""
    depth = min(head.max_depth, tree.deepest)
    grown = [tree] if tree.kind in CONFIDENT else []
    records = [record(target, head, text, grown, depth) for text in material.texts]
    steps = [steps_of(each, tree) for each in records]
    counts = [
        counted([step.accepted for step in of], sum(step.nodes for step in of), each.text.made - 1)
        for of, each in zip(steps, records, strict=True)
    ]
    return table(records, depth), counts


def table(records: Sequence[Record], depth: int) -> dict[str, Any]:
    """Return acceptance by depth and rank down to a depth, its first column by itself, and that of whole chains."""
    rank = torch.tensor([row for each in records for row in each.rank], dtype=torch.long)
    rank = rank.view(-1, depth)  # of no tokens too
    found = acceptance(rank, RANKS)
    right = (rank == 0).long().cumprod(1).double()
    known = (rank >= 0).double()
    return {
        "tokens": len(rank),
        "rank": found.tolist(),
        "n_alpha": found[:, 0].tolist(),
        "at_every_token": (right.sum(0) / known.sum(0).clamp_min(1)).tolist(),
    }


def _drawn(
    target: Target, head: Any, tree: TreeConfig, material: Material, sampling: Sampling
) -> tuple[dict[str, Any], list[Passes]]:
    """Return what is known of a head whose chains are drawn."""
    depth = min(head.max_depth, tree.deepest)
    each = [overlap(target, head, text, sampling, depth) for text in material.texts]
    ranked = table([record(target, head, text, [], depth) for text in material.texts], depth)
    return ranked | drawn_table(each), [expected(one, depth) for one in each]


def drawn_table(overlaps: Sequence[Overlap]) -> dict[str, Any]:
    """Return n_alpha, and P(a >= k) of chains after every token, of drafts drawn from the head's law."""
    common = torch.cat([each.common for each in overlaps]).double()
    known = common.isfinite()
    reached = torch.cat([each.share for each in overlaps]).double().cumprod(1)
    count = known.sum(0).clamp_min(1)
    return {
        "n_alpha": (common.nan_to_num(0.0).sum(0) / count).tolist(),
        "at_every_token": ((reached * known).sum(0) / count).tolist(),
    }
