"""The losslessness checks of an evaluation: greedy tokens, sampled tokens and timed tokens.

Above temperature 0, under coupled noise (arXiv 2408.07978), a token depends on the text before it and the seed alone,
so every drafter must emit the tokens of autoregressive decoding, one for one: that covers the engine. A rule's uniform
numbers and residuals are covered by sampling: many steps after fixed prefixes, in the engine that decodes the drafts.
Their first tokens must follow the target's probs there. As many samples of a rule that is known to be broken, which
samples from p again after a rejection, must fail that test.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from data.text.prompts import Prompt
from eval.config import DecodingConfig
from eval.inputs.drafters import Drafters
from eval.live.interleaved import HF, PLAIN, Runs, Setup, decoded_once, medians
from eval.measures import losslessness
from eval.measures.losslessness import (
    EPSILON,
    Cells,
    ChiSquareTest,
    Divergence,
    Gate,
    SampledGate,
    divergence,
    gate,
    gate_of,
    labelled,
    worst,
)
from heads.common.progress import progress, tick
from inference.batch import Running, acquire, needed_entries, release
from inference.decode import Generation, RequestParams, reference
from inference.drafters.plain import Baseline
from inference.protocol import Commit, Context, Drafter, Proposal
from inference.request import Request
from inference.step import supports
from inference.target.cache import TargetCache
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.rng import CoupledRng, Rng, SeededRng, hashed
from inference.verification.sample import distribution
from inference.verification.tree import children
from inference.verification.verify import COUPLED, decide, is_lossy


def check(
    target: Target, drafters: Drafters, prompts: Sequence[Prompt], config: DecodingConfig, total_variation: float
) -> tuple[dict[str, Gate], list[SampledGate]]:
    """Return the losslessness check of each drafter at each batch size, and at each temperature above 0.

    Greedily every prompt runs once. All are compared with autoregressive decoding of each prompt alone by the reference
    engine; so is the baseline, which the drafters' engine decodes. Above 0 a chi-square test reveals a total variation
    of `total_variation`.
    """
    sizes = config.batch_sizes()
    if not drafters and sizes == [1]:
        return {}, []
    setup, ids = Setup(target, drafters, prompts, config.settings(0.0, gaps=True)), [prompt.id for prompt in prompts]
    baseline = Baseline(target.device)
    alone = [
        reference(target, baseline, prompt.token, setup.settings) for prompt in progress(prompts, "the baseline alone")
    ]
    gates = {}
    for size in sorted(sizes):
        for name, runs_of in decoded_once(setup, size).items():
            verdict = gate(alone, runs_of, ids, target.dtype)
            gates[labelled(name, size)] = replace(verdict, lossy=name != PLAIN and is_lossy(config.rule))
    hot = [temperature for temperature in config.temperatures() if temperature > 0] if drafters else []
    tests, sampled = len(hot) * len(drafters), []
    for temperature in hot:
        sampled += sampled_gates(setup._replace(settings=config.settings(temperature)), total_variation, tests, sizes)
    return gates, sampled


def agreement(target: Target, runs: Runs) -> dict[str, dict[str, Any]]:
    """Return how many of each drafter's timed greedy answers equal the baseline's, in the timed dtype."""
    middle = medians({name: runs_of for name, runs_of in runs.items() if name != HF})
    baseline, dtype = middle.pop(PLAIN), str(target.dtype).removeprefix("torch.")
    equal = {
        name: [ours.tokens == theirs.tokens for ours, theirs in zip(baseline, runs_of, strict=True)]
        for name, runs_of in middle.items()
    }
    return {name: {"dtype": dtype, "checked": len(same), "identical": sum(same)} for name, same in equal.items()}


PREFIXES = 2  # prefixes after which tokens are sampled
CANDIDATES = 12  # prompts considered for them
DEPTH = 2  # the depth of drafts that the host resamples: deeper nodes cannot change the first token
TOGETHER = 16  # sequences at a prefix in one step of the engine, if memory allows


class Prefix(NamedTuple):
    """A prefix to sample after: its request, a draft, the target's logits at the draft and probs at the root."""

    request: Request
    proposal: Proposal
    logits: Float[Tensor, "N V"]
    probs: Float[Tensor, "V"]
    cells: Cells

    def usable(self, tv: float) -> bool:
        """Whether there is a draft, and the broken rule is off by more than a total variation."""
        best = float(self.probs.max())
        return len(self.proposal.tree.token) > 1 and self.cells.freedom > 0 and best * (1 - best) > tv

    def drafted(self) -> float:
        """Return the target's total probability of the tokens drafted at depth 1."""
        tree = self.proposal.tree
        return float(self.probs[tree.token[children(tree)[0]].unique()].sum())


def sampled_gates(setup: Setup, tv: float, tests: int, sizes: Sequence[int] = (1,)) -> list[SampledGate]:
    """Return the verdict on every drafter at the settings' temperature, which is above 0.

    Coupled tokens are compared with autoregressive decoding of each prompt alone by the reference engine, at batch size
    1 and at all `sizes`: a token's noise depends on its text and the seed, not on the rest of the batch. The chi-square
    test must detect a total variation of `tv`; the `tests` of a report share the error probability.
    """
    target, drafters, prompts, settings = setup
    coupled = replace(settings, rule=COUPLED, lossy=False, gaps=True)
    all_sizes = tuple(sorted({1, *sizes}))
    runs = {size: decoded_once(setup._replace(settings=coupled), size) for size in all_sizes}
    baseline = [
        reference(target, Baseline(target.device), prompt.token, coupled)
        for prompt in progress(prompts, "the baseline, sampled")
    ]
    verdicts = []
    candidates = texts(prompts, baseline)
    for name, drafter in drafters.items():
        equal = {size: coupled_check(target, baseline, run[name], prompts, coupled) for size, run in runs.items()}
        failed_at = next((size for size, check in equal.items() if check.failed), None)
        test, why = chi_square_test(target, drafter, candidates, settings, tv, losslessness.ALPHA / tests)
        merged = worst(list(equal.values()))
        verdicts.append(SampledGate(name, settings.sampling.temperature, merged, test, why, all_sizes, failed_at))
    return verdicts


def coupled_check(
    target: Target,
    baseline: Sequence[Generation],
    drafted: Sequence[Generation],
    prompts: Sequence[Prompt],
    how: RequestParams,
) -> Gate:
    """Compare runs under coupled noise; a near tie is one of probs over noise."""

    def compared(ours: Generation, theirs: Generation, prompt: Prompt) -> tuple[Divergence | None, bool]:
        parted = divergence(ours, theirs, prompt.id)
        if parted is None:
            return None, False
        both = parted.plain is not None and parted.drafted is not None
        gap = coupled_gap(target, prompt.token, ours.tokens[: parted.position], how) if both else None
        return replace(parted, gap=gap), gap is not None and gap < EPSILON[target.dtype]

    return gate_of(compared(*runs) for runs in zip(baseline, drafted, prompts, strict=True))


@torch.inference_mode()
def coupled_gap(target: Target, prompt: list[int], answer: list[int], how: RequestParams) -> float:
    """Return the gap, in logits, between the two best tokens after a text under coupled noise."""
    request = _session(target, Baseline(target.device), prompt, answer, how)
    out = target.prefill(torch.tensor(request.context, device=target.device), request.cache)
    assert out.logits is not None
    logits = request.processed(out.logits[0, -1:], trees.root(request.context[-1], target.device))
    noise = CoupledRng(how.seed, target.device, request.context)
    first, second = noise.exponential_scores(distribution(logits, how.sampling))[0].double().topk(2).values.tolist()
    return float(how.sampling.temperature * torch.log(torch.tensor(first / second))) if second > 0 else float("inf")


def texts(prompts: Sequence[Prompt], baseline: Sequence[Generation]) -> list[tuple[list[int], list[int]]]:
    """Return different prompts with their answers up to the smallest logit gap, the smallest gaps first."""
    prefixes: list[tuple[float, tuple[list[int], list[int]]]] = []
    for prompt, run in zip(prompts, baseline, strict=True):
        gaps = run.gaps[1:]  # the first draft comes after one token of the answer
        if gaps:
            at = min(range(len(gaps)), key=gaps.__getitem__) + 1
            prefix = prompt.token, run.tokens[:at]
            if prefix not in (other for _, other in prefixes):  # a log may repeat a question
                prefixes.append((run.gaps[at], prefix))
    return [prefix for _, prefix in sorted(prefixes, key=lambda prefix: prefix[0])[:CANDIDATES]]


@torch.inference_mode()
def chi_square_test(
    target: Target,
    drafter: Drafter,
    candidates: Sequence[tuple[list[int], list[int]]],
    settings: RequestParams,
    tv: float,
    alpha: float,
) -> tuple[ChiSquareTest | None, str]:
    """Sample next tokens after a few prefixes and test them against the target's probs; or return why not."""
    usable = [prefix for text in candidates if (prefix := _prefix(target, drafter, *text, settings)).usable(tv)]
    if any(prefix.proposal.q is not None for prefix in usable) and not drafter.can_redraft:
        return None, "no draws: its drafts are drawn by a model with a state of its own"
    prefixes = sorted(usable, key=Prefix.drafted, reverse=True)[:PREFIXES]
    if not prefixes:
        return None, "no draws: at no prompt was anything drafted where the target has a choice"
    count = losslessness.samples_for([prefix.cells for prefix in prefixes], tv, alpha)
    freedom = sum(prefix.cells.freedom for prefix in prefixes)
    rng = SeededRng(hashed(f"{settings.seed} control"), target.device)
    total = control = 0.0
    for number, prefix in enumerate(progress(prefixes, f"sampling tokens, {drafter.name}")):
        seeds = (
            f"{settings.seed} distribution {number}"  # its own: common random numbers would correlate the statistics
        )
        total += losslessness.statistic(prefix.cells, _samples(prefix, settings, seeds, count))
        control += losslessness.statistic(prefix.cells, resampled(prefix.probs, rng, count))
    p, control_p = losslessness.p_value(total, freedom), losslessness.p_value(control, freedom)
    size, power = count * len(prefixes), losslessness.POWER
    return ChiSquareTest(size, len(prefixes), freedom, total, p, tv, power, alpha, control_p), ""


def _session(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    answer: list[int],
    how: RequestParams,
    cache: TargetCache | None = None,
) -> Request:
    """Return a request with a prompt's tokens and its answer so far, and an empty KV cache or a given one."""
    request = Request(target, drafter, prompt, how, cache)
    request.context.extend(answer)
    request.generation.tokens.extend(answer)
    return request


def _enter(request: Request) -> None:
    """Prefill a request's tokens except the last, the root of the first draft."""
    text, drafter = request.context, request.drafter
    request.state = drafter.start(text[:-1])
    token = torch.tensor(text, device=request.target.device)
    out = request.target.prefill(token[:-1], request.cache, drafter.feature_layers)
    request.state.update(Commit(token[1:], out, None))


def _prefix(target: Target, drafter: Drafter, prompt: list[int], answer: list[int], settings: RequestParams) -> Prefix:
    """Prefill a prefix, draft after it, and score the draft by the target in one tree pass."""
    request = _session(target, drafter, prompt, answer, settings)
    _enter(request)
    root = trees.root(request.context[-1], target.device)
    expected = distribution(_scored(request, Proposal(root)), settings.sampling)[0]
    proposal = request.draft()
    if proposal.q is not None and drafter.can_redraft and not _batched(request):  # deep nodes only cost time
        request.limit = min(request.limit, len(answer) + 1 + DEPTH)
        proposal = request.draft()
    logits = _scored(request, proposal)
    return Prefix(request, proposal, logits, expected, losslessness.cells(expected))


def _scored(request: Request, proposal: Proposal) -> Float[Tensor, "N V"]:
    """Return the target's processed logits after each node, and drop the nodes' KV entries."""
    request.cache.snapshot()
    if proposal.first_layers is None:
        out = request.target.score(proposal.tree, request.cache, proposal.look_ahead)
    else:
        out = request.target.parts.score_from(proposal.first_layers, proposal.tree, request.cache)
    request.cache.keep(len(request.context) - 1, [])
    assert out.logits is not None
    return request.processed(out.logits[0, : len(proposal.tree.token)], proposal.tree)


def _batched(request: Request) -> bool:
    """Whether a request's drafts are verified for whole batches on the device."""
    return supports(request.target, [request]) and request.drafter.clones(1)[1] is not None


def _samples(prefix: Prefix, settings: RequestParams, seeds: str, count: int) -> list[int]:
    """Return first tokens from the engine by the rule in use; `seeds` is the key of all randomness."""
    if not _batched(prefix.request):
        return _decided(prefix, settings, seeds, count)
    with suppress(torch.OutOfMemoryError):  # the allocator may refuse the whole batch
        if sampled := _stepped(prefix, settings, seeds, count, TOGETHER):
            return sampled
    return _stepped(prefix, settings, seeds, count, 1)


def _stepped(prefix: Prefix, settings: RequestParams, seeds: str, count: int, size: int) -> list[int]:
    """Return first tokens from steps of a batch of `size` sequences at the prefix.

    Before each step they are reset to the prefix, with new seeds. Empty if memory is short for several sequences, or if
    nothing is drafted at this size.
    """
    request = prefix.request
    target, text, answer = request.target, request.context, request.generation.tokens
    prompt = text[: len(text) - len(answer)]
    room = text, replace(settings, max_new_tokens=1, min_new_tokens=0)
    try:
        batch = acquire(target, request.drafter, size, [room])
    except ValueError:  # as one is refused for which memory is short; an error of a step is none of these
        if size == 1:
            raise
        return []
    batch.reserve(needed_entries(target, *room))
    for slot in range(size):
        one = _session(target, batch.free.pop(), prompt, answer, settings, batch.cache.allocate(slot))
        _enter(one)
        batch.slots.append(Running(slot, one, 0.0))
    assert batch.drafts is not None
    buffers = batch.drafts.tensors()
    before = [buffer.clone() for buffer in buffers]
    sampled: list[int] = []
    while len(sampled) < count:
        for slot, one in enumerate(sequence.request for sequence in batch.running):
            how = replace(settings, seed=hashed(f"{seeds} {len(sampled) + slot}"))
            again = _session(target, one.drafter, prompt, answer, how, one.cache)
            again.state = one.state
            again.cache.set_length(len(text) - 1)
            batch.slots[slot] = Running(slot, again, 0.0)
        batch.step()
        stepped = [sequence.request.generation for sequence in batch.running]
        if size > 1 and not any(generation.steps[-1].drafted for generation in stepped):
            break
        sampled += [generation.tokens[len(answer)] for generation in stepped]
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
    for sequence in batch.running:
        sequence.request.generation.finish = "length"
    batch.release()
    release(target, request.drafter, batch)
    return sampled[:count]


def _decided(prefix: Prefix, settings: RequestParams, seeds: str, count: int) -> list[int]:
    """Return first tokens decided on the host."""
    request, sampling = prefix.request, settings.sampling
    device, start = request.target.device, len(request.context)
    max_draft_depth = request.limit - len(request.generation.tokens) - 1
    cached: dict[tuple[int, ...], Tensor] = {(): prefix.logits[0]}
    sampled: list[int] = []
    rng: Rng = SeededRng(hashed(seeds), device)
    proposal, logits = prefix.proposal, prefix.logits
    for i in range(count):
        tick()
        if settings.rule == COUPLED:  # coupled noise depends on the seed, so every sample has its own seed
            rng = CoupledRng(hashed(f"{seeds} {i}"), device, range(start))
        if proposal.q is not None:
            proposal = request.state.propose(Context(request.context, sampling, rng, max_draft_depth, request.cache))
            logits = _looked_up(request, proposal, cached)
        path, token, _ = decide(proposal.tree, logits, proposal.q, sampling, rng, settings.rule)
        sampled.append(int(proposal.tree.token[path[1]]) if len(path) > 1 else token)
    return sampled


def _looked_up(request: Request, proposal: Proposal, cached: dict[tuple[int, ...], Tensor]) -> Float[Tensor, "N V"]:
    """Return the logits at a draft's nodes; the target runs only if a child of the root is not cached.

    Deeper nodes get the root's logits: they cannot change the first token.
    """
    tree = proposal.tree
    below = [(int(token),) for token in tree.token[children(tree)[0]]]
    if any(path not in cached for path in below):
        scored = _scored(request, proposal)
        cached.update(zip(below, scored[children(tree)[0]], strict=True))
    logits = [cached[()]] * len(tree.token)
    for node, path in zip(children(tree)[0], below, strict=True):
        logits[node] = cached[path]
    return torch.stack(logits)


def resampled(probs: Float[Tensor, "V"], rng: SeededRng, count: int) -> list[int]:
    """Return first tokens by a broken rule: after a rejection it samples from p instead of the residual.

    The draft is the target's argmax, where the broken rule is furthest from p.
    """
    best = int(probs.argmax())
    accepted = [rng.accept(float(probs[best])) for _ in range(count)]
    sampled = rng.sample(probs.expand(count, -1))
    return [best if accept else token for accept, token in zip(accepted, sampled, strict=True)]
