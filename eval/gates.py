"""The losslessness checks of an evaluation: greedy tokens and sampled tokens.

Above temperature 0 with coupled noise (arXiv 2408.07978), a token depends only on the text before it and the seed, so
every drafter must emit exactly the tokens of autoregressive decoding: this tests the engine. A rule's uniform numbers
and residuals are tested by sampling: many decoding steps after fixed prefixes, in the engine that decodes the drafts.
Their first tokens must follow the target's probs. As many samples of a rule that is known to be broken, which samples
from p again after a rejection, must fail that test.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from eval.config import DecodingConfig
from eval.inputs.drafters import Drafters
from eval.live import Prompts, Setup, decoded_once, hf_generate
from eval.measures import losslessness
from eval.measures.results import BASELINE
from heads.base import Tokens
from heads.common.progress import progress, update_bar
from inference.batch import Batch, acquire, needed_entries, release
from inference.decode import Generation, RequestParams, autoregress
from inference.protocol import Drafter
from inference.request import Request
from inference.target.cache import TargetCache
from inference.target.target import Target
from inference.verification.rng import RequestRng, Samples, hashed, seed_key
from inference.verification.rules import COUPLED, is_lossy
from inference.verification.sample import distribution


def check(
    target: Target, drafters: Drafters, prompts: Prompts, config: DecodingConfig, total_variation: float
) -> tuple[dict[str, losslessness.Gate], list[losslessness.SampledGate]]:
    """Return each drafter's losslessness check at each batch size, and at each temperature above 0.

    Greedily every prompt runs once, and the baseline and all drafters are compared with transformers' own `generate`.
    Above 0 a chi-square test detects a total variation of `total_variation`.
    """
    sizes = config.batch_size
    if not drafters and sizes == [1]:
        return {}, []
    setup = Setup(target, drafters, prompts, config.params(0.0, logit_gaps=True))
    ids = [prompt.id for prompt in prompts]
    reference = [hf_generate(target, prompt.token, setup.params) for prompt in progress(prompts, "transformers' own")]
    gates = {}
    for size in sorted(sizes):
        for name, runs_of in decoded_once(setup, size).items():
            verdict = losslessness.gate(reference, runs_of, ids, target.dtype)
            gates[losslessness.drafter_label(name, size)] = replace(
                verdict, lossy=name != BASELINE and is_lossy(config.rule)
            )
    hot = [temperature for temperature in config.temperature if temperature > 0] if drafters else []
    tests, sampled = len(hot) * len(drafters), []
    for temperature in hot:
        sampled += sampled_gates(setup._replace(params=config.params(temperature)), total_variation, tests, sizes)
    return gates, sampled


PREFIXES = 2  # number of texts after which tokens are sampled
CANDIDATES = 12  # number of texts considered as prefixes
TOGETHER = 16  # sequences at a prefix per step of the engine, if memory allows
Text = tuple[Tokens, Tokens]  # a prompt, and its answer so far


class Prefix(NamedTuple):
    """A text to sample after: a prompt and its answer so far, and the target's probs after it."""

    prompt: Tokens
    answer: Tokens
    draws: bool  # whether the host samples children, by a stateful model
    probs: losslessness.Probs
    cells: losslessness.Cells
    drafted_prob: float  # the target's probability of all tokens drafted at depth 1


def sampled_gates(setup: Setup, tv: float, tests: int, sizes: Sequence[int] = (1,)) -> list[losslessness.SampledGate]:
    """Return the result for every drafter at the temperature of the setup's params, above 0.

    Coupled tokens are compared with autoregressive decoding of each prompt, at batch size 1 and at all `sizes`: a
    token's noise depends on its text and the seed, not on the batch. The chi-square test must detect a total variation
    of `tv`; the `tests` of a report share the error probability.
    """
    target, drafters, prompts, params = setup
    coupled = replace(params, rule=COUPLED, lossy=False, logit_gaps=True)
    all_sizes = tuple(sorted({1, *sizes}))
    runs = {size: decoded_once(setup._replace(params=coupled), size) for size in all_sizes}
    baseline = [autoregress(target, prompt.token, coupled) for prompt in progress(prompts, "the baseline, sampled")]
    verdicts = []
    candidates = texts(prompts, baseline)
    for name, drafter in drafters.items():
        equal = {size: coupled_check(target, baseline, run[name], prompts, coupled) for size, run in runs.items()}
        failed_at = next((size for size, check in equal.items() if check.failed), None)
        test, why = chi_square_test(target, drafter, candidates, params, tv, losslessness.ALPHA / tests)
        merged = losslessness.worst(list(equal.values()))
        verdicts.append(
            losslessness.SampledGate(name, params.sampling.temperature, merged, test, why, all_sizes, failed_at)
        )
    return verdicts


def coupled_check(
    target: Target,
    baseline: Sequence[Generation],
    drafted: Sequence[Generation],
    prompts: Prompts,
    params: RequestParams,
) -> losslessness.Gate:
    """Compare runs under coupled noise; near ties are those of the noisy probs."""
    compared = []
    for ours, theirs, prompt in zip(baseline, drafted, prompts, strict=True):
        divergence, gap = losslessness.first_divergence(ours, theirs, prompt.id), None
        if divergence is not None and divergence.plain is not None and divergence.drafted is not None:
            gap = coupled_gap(target, prompt.token, ours.tokens[: divergence.position], params)
        tied = gap is not None and gap < losslessness.EPSILON[target.dtype]
        compared.append((None if divergence is None else replace(divergence, gap=gap), tied))
    return losslessness.gate_of(compared)


@torch.inference_mode()
def coupled_gap(target: Target, prompt: Tokens, answer: Tokens, params: RequestParams) -> float:
    """Return the margin in logits between the two best tokens under coupled noise after a text."""
    request = _request(target, prompt, answer, params, target.cache())
    probs = _probs(request)
    noise = RequestRng(request.rng_key, len(request.token_ids), False).noise(range(1), probs[None])
    first, second = (probs / noise[0]).double().topk(2).values.tolist()
    return float(params.sampling.temperature * torch.log(torch.tensor(first / second))) if second > 0 else float("inf")


def texts(prompts: Prompts, baseline: Sequence[Generation]) -> list[Text]:
    """Return different prompts with their answers up to the smallest logit gap, in order of the gap."""
    prefixes: list[tuple[float, Text]] = []
    for prompt, run in zip(prompts, baseline, strict=True):
        gaps = run.logit_gaps[1:]  # the first draft comes after one token of the answer
        if gaps:
            at = gaps.index(min(gaps)) + 1
            prefix = prompt.token, run.tokens[:at]
            if prefix not in (other for _, other in prefixes):  # a log may repeat a question
                prefixes.append((run.logit_gaps[at], prefix))
    return [prefix for _, prefix in sorted(prefixes, key=lambda prefix: prefix[0])[:CANDIDATES]]


@torch.inference_mode()
def chi_square_test(
    target: Target, drafter: Drafter, candidates: Sequence[Text], params: RequestParams, tv: float, alpha: float
) -> tuple[losslessness.ChiSquareTest | None, str]:
    """Sample next tokens after a few prefixes and test them against the target's probs; or return why not."""
    usable = [prefix for text in candidates if (prefix := _prefix(target, drafter, *text, params, tv)) is not None]
    if any(prefix.draws for prefix in usable):
        return None, "no draws: its drafts are drawn by a model with a state of its own"
    prefixes = sorted(usable, key=lambda prefix: prefix.drafted_prob, reverse=True)[:PREFIXES]
    if not prefixes:
        return None, "no draws: at no prompt was anything drafted where the target has a choice"
    count = losslessness.samples_for([prefix.cells for prefix in prefixes], tv, alpha)
    freedom = sum(prefix.cells.degrees_of_freedom for prefix in prefixes)
    samples = Samples(torch.tensor([seed_key(hashed(f"{params.seed} control"))], device=target.device))
    total = control = 0.0
    for index, prefix in enumerate(progress(prefixes, f"sampling tokens, {drafter.name}")):
        seeds = f"{params.seed} distribution {index}"  # shared random numbers would correlate statistics
        total += losslessness.statistic(prefix.cells, _samples(target, drafter, prefix, params, seeds, count))
        # A broken rule samples from p again after a rejection; its draft is p's argmax, where it is furthest from p.
        best = prefix.probs.argmax()
        first, second = samples.sample(prefix.probs.expand(1, 2 * count, -1))[0].chunk(2)
        control += losslessness.statistic(prefix.cells, torch.where(first == best, best, second).tolist())
    p, control_p = losslessness.p_value(total, freedom), losslessness.p_value(control, freedom)
    size, power = count * len(prefixes), losslessness.POWER
    return losslessness.ChiSquareTest(size, len(prefixes), freedom, total, p, tv, power, alpha, control_p), ""


def _request(target: Target, prompt: Tokens, answer: Tokens, params: RequestParams, cache: TargetCache) -> Request:
    request = Request(target, prompt, params, cache)
    request.token_ids.extend(answer)
    request.generation.tokens.extend(answer)
    return request


def _probs(request: Request) -> losslessness.Probs:
    """Return the target's probs after a text; all its tokens enter the cache."""
    out = request.target.prefill(torch.tensor(request.token_ids, device=request.target.device), request.cache)
    assert out.logits is not None
    return distribution(request.process_logits(out.logits[0]), request.params.sampling)[0]


def _entered(
    target: Target, drafter: Drafter, prompt: Tokens, answer: Tokens, params: RequestParams, size: int
) -> tuple[Batch, list[Request]]:
    """Return a batch of `size` sequences, all at the end of a text."""
    text, one_more = prompt + answer, replace(params, max_new_tokens=1, min_new_tokens=0)
    batch = acquire(target, drafter, size, [(text, one_more)])
    batch.reserve(needed_entries(target, text, one_more))
    token, requests = torch.tensor(text, device=target.device), []
    for slot in range(batch.size):
        requests.append(_request(target, prompt, answer, params, batch.cache.allocate(slot)))
        out = target.prefill(token[:-1], requests[slot].cache, batch.draft_batch.traits.feature_layers)
        batch.draft_batch.start_sequence(slot, text, out)
    batch.slots = [*requests]
    return batch, requests


def _left(batch: Batch) -> None:
    for request in batch.running:
        request.generation.finish_reason = "length"
    batch.release()
    release(batch.target, batch.drafter, batch)


def _prefix(
    target: Target, drafter: Drafter, prompt: Tokens, answer: Tokens, params: RequestParams, tv: float
) -> Prefix | None:
    """Draft once after a text; None without a draft, or if the broken rule's total variation is at most `tv`."""
    batch, requests = _entered(target, drafter, prompt, answer, params, 1)
    _, drafted = batch.device_step.dry_run(requests)
    draws = batch.device_step.plan.sampled is not None and not batch.draft_batch.traits.on_device
    probs = _probs(_request(target, prompt, answer, params, target.cache()))
    _left(batch)
    (token, *_), (parent, *_) = drafted.tree
    children = token[(parent == 0) & (token >= 0)].unique()
    cells, best = losslessness.group_rare_tokens(probs), float(probs.max())
    if not len(children) or not cells.degrees_of_freedom or best * (1 - best) <= tv:
        return None
    return Prefix(prompt, answer, draws, probs, cells, float(probs[children].sum()))


def _samples(target: Target, drafter: Drafter, prefix: Prefix, params: RequestParams, seeds: str, count: int) -> Tokens:
    """Return first tokens from the engine's steps under the rule in use; `seeds` is the key of all randomness.

    Several sequences at the prefix share a step, each with new seeds. A step has one sequence if the target takes no
    trees, if memory allows only one, or if nothing is drafted for several, as under a schedule.
    """
    for size in (TOGETHER, 1) if target.takes_trees else (1,):
        with suppress(*((torch.OutOfMemoryError, ValueError) if size > 1 else ())):
            batch, requests = _entered(target, drafter, prefix.prompt, prefix.answer, params, size)
            sampled, drafts = Tokens(), True
            while len(sampled) < count and drafts:
                update_bar()
                for slot, request in enumerate(requests):
                    request.rng_key = seed_key(hashed(f"{seeds} {len(sampled) + slot}"))
                sampled += batch.device_step.dry_run(requests)[0]
                drafts = size == 1 or batch.device_step.plan.tree_depth > 0
            _left(batch)
            if drafts:
                return sampled[:count]
    raise AssertionError("one sequence always samples")
