"""The gate above temperature 0 passes what is right, and catches a rule, an engine and a control that are not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from data.text.prompts import Prompt
from eval import gates, live
from eval.gates import coupled_check, coupled_gap, sampled_gates
from eval.live import Setup
from eval.measures import losslessness
from eval.measures.losslessness import (
    UNCHECKED,
    Cells,
    ChiSquareTest,
    Divergence,
    Gate,
    SampledGate,
    group_rare_tokens,
    p_value,
    samples_for,
    samples_needed,
    statistic,
    verdict_of,
    worst,
)
from inference import step
from inference.decode import Generation, RequestParams, autoregress
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import Schedule, ScheduleLine
from inference.drafters.prompt_lookup import PromptLookup
from inference.protocol import Drafter
from inference.verification import rng, rules
from inference.verification.rules import COUPLED
from inference.verification.sample import Sampling
from tests import toys

PROMPTS = [Prompt(f"p{i}", toys.prompt(i, 12), "") for i in range(3)]
HOT = RequestParams(10, Sampling(1.0, 0, 1.0))
TV = 0.2


def heads(*trees: str) -> dict[str, Drafter]:
    """Return the toy EAGLE head under trees: chains are drawn, dynamic trees are chosen."""
    head: Any = toys.head("eagle", toys.target())
    return {tree: HeadDrafter(head, toys.TREES[tree], tree) for tree in trees}


def verdicts(*trees: str, tv: float = TV, **changes: Any) -> list[SampledGate]:
    return sampled_gates(Setup(toys.target(), heads(*trees), PROMPTS, replace(HOT, **changes)), tv, 2)


def test_right_rules_pass_and_the_control_is_caught() -> None:
    for found in verdicts("chain", "dynamic"):
        assert found.passed
        assert (found.coupled.checked, found.coupled.identical) == (3, 3)
        assert found.distribution is not None
        assert found.distribution.control_rejected
        assert (found.distribution.tv, found.distribution.alpha) == (TV, 1e-3 / 2)
        assert "broken control caught" in str(found)
        assert found.as_dict()["distribution"]["control_p"] < found.as_dict()["distribution"]["alpha"]


def sampled_test(
    tree: str, tv: float = 0.1, temperature: float = 2.0, schedule: Schedule | None = None
) -> ChiSquareTest:
    """Return the test of the toy MTP head's draws; about half of them are accepted."""
    target, params = toys.target(), replace(HOT, sampling=Sampling(temperature, 0, 1.0), logit_gaps=True)
    head: Any = toys.head("mtp", target)
    candidates = gates.texts(PROMPTS, [autoregress(target, prompt.token, params) for prompt in PROMPTS])
    drafter = HeadDrafter(head, toys.TREES[tree], tree, schedule)
    found, why = gates.chi_square_test(target, drafter, candidates, replace(params, logit_gaps=False), tv, 1e-3)
    assert found is not None, why
    return found


def easier_coins(coins: rules.AcceptDraws, probability: torch.Tensor, tested: torch.Tensor) -> torch.Tensor:
    """Toss coins that fall on the draft's side twice as often."""
    uniforms = coins.uniforms.gather(1, coins.used_uniforms[:, None])[:, 0]
    coins.used_uniforms = coins.used_uniforms + tested
    return tested & (uniforms * 0.5 < probability)


@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_easier_coins_on_the_device_are_caught(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_test(tree).passed
    monkeypatch.setattr(rules.AcceptDraws, "sample", easier_coins)
    found = sampled_test(tree)
    assert found.control_rejected
    assert found.p_value < found.alpha


def test_numbers_that_drafts_and_coins_share_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "DRAFT_KEY", rng.ACCEPT_KEY)
    found = sampled_test("chain", 0.08, 3.0)
    assert found.control_rejected
    assert found.p_value < found.alpha


def test_a_walk_that_likes_its_drafts_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafts that are chosen: the score of the first drafted token is raised."""
    assert sampled_test("dynamic").passed
    choose = step.DeviceStep.sample_target

    def above_threshold(self: Any, slots: Any, drafted: Any, scores: Any, *others: Any) -> torch.Tensor:
        if drafted.tree.token.shape[1] > 1:
            scores = scores.clone()
            scores[torch.arange(len(scores)), 0, drafted.tree.token[:, 1]] += 12
        return choose(self, slots, drafted, scores, *others)

    monkeypatch.setattr(step.DeviceStep, "sample_target", above_threshold)
    assert not sampled_test("dynamic").passed


@pytest.mark.parametrize("paused", [True, False])
def test_a_batch_that_drafts_nothing_or_finds_no_memory_leaves_the_draws_to_one_sequence(
    paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, acquire = list[int](), gates.acquire

    def noted(target: Any, drafter: Any, size: int, requests: Any) -> Any:
        sizes.append(size)
        if size > 1 and not paused:
            raise ValueError("no memory")
        return acquire(target, drafter, size, requests)

    monkeypatch.setattr(gates, "acquire", noted)
    tree = toys.TREES["chain"]
    found = sampled_test(
        "chain", 0.2, 1.0, Schedule([ScheduleLine(1, tree), ScheduleLine(2, None if paused else tree)])
    )
    assert found.passed
    assert sizes[-2 * found.prefixes :] == [gates.TOGETHER, 1] * found.prefixes


def test_prefixes_share_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = list[str]()

    def noted(_target: Any, _drafter: Any, _prefix: Any, _settings: Any, of_prefix: str, count: int) -> list[int]:
        seeds.append(of_prefix)
        return [0] * count

    monkeypatch.setattr(gates, "_samples", noted)
    assert sampled_test("chain", 0.06, 4.0).prefixes == 2
    assert len({*seeds}) == 2


def test_a_question_that_was_asked_twice_is_one_prefix() -> None:
    plain = [autoregress(toys.target(), prompt.token, replace(HOT, logit_gaps=True)) for prompt in PROMPTS]
    once = gates.texts(PROMPTS, plain)
    assert len(once) == 3
    assert gates.texts([*PROMPTS, *PROMPTS], [*plain, *plain]) == once


@pytest.mark.parametrize("source", ["chain", "lookup"])
def test_a_rule_that_likes_its_drafts_too_much_is_caught(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head on a target that takes no masks, and of a drafter without a head."""
    target, drafters = toys.target(), heads("chain")
    monkeypatch.setattr(target, "takes_trees", source == "lookup")
    if source == "lookup":
        drafters = {"lookup": PromptLookup(PromptLookup.Config(1, 1, 3, "last"), target, "lookup")}
    prompts = [prompt._replace(token=[*range(toys.VOCAB), *prompt.token]) for prompt in PROMPTS]
    setup = Setup(target, drafters, prompts, HOT)
    assert sampled_gates(setup, TV, 1)[0].passed
    monkeypatch.setattr(rules.AcceptDraws, "sample", easier_coins)
    choose = step.DeviceStep.sample_target

    def above_threshold(self: Any, slots: Any, drafted: Any, logits: Any, sampling: Any, *others: Any) -> torch.Tensor:
        logits = logits.clone()
        if drafted.tree.token.shape[1] > 1 and drafted.noise is None:
            logits[torch.arange(len(logits)), 0, drafted.tree.token[:, 1].clamp_min(0)] += 12
        return choose(self, slots, drafted, logits, sampling, *others)

    monkeypatch.setattr(step.DeviceStep, "sample_target", above_threshold)
    (found,) = sampled_gates(setup, TV, 1)
    assert found.distribution is not None
    assert found.distribution.control_rejected
    assert not found.passed
    assert found.distribution.p_value < found.distribution.alpha
    assert found.coupled.passed


def test_tokens_that_differ_under_coupled_noise_are_a_failure_with_their_gap() -> None:
    target, params = toys.target(), replace(HOT, rule=COUPLED, logit_gaps=True)
    plain = [autoregress(target, prompt.token, params) for prompt in PROMPTS]
    other = Generation(tokens=[*plain[0].tokens[:4], (plain[0].tokens[4] + 1) % toys.VOCAB, *plain[0].tokens[5:]])
    found = coupled_check(target, plain, [other, *plain[1:]], PROMPTS, params)
    assert found.counts() == {"checked": 3, "identical": 2, "near_tie": 0, "failed": 1}
    assert found.first is not None
    assert (found.first.prompt, found.first.position) == ("p0", 4)
    assert found.first.gap == pytest.approx(coupled_gap(target, PROMPTS[0].token, plain[0].tokens[:4], params))
    assert found.verdicts == ("failed", "identical", "identical")


def test_coupled_tokens_are_the_same_in_every_batch() -> None:
    (found,) = sampled_gates(Setup(toys.target(), heads("dynamic"), PROMPTS, HOT), TV, 1, [4, 2])
    assert found.passed
    assert (found.batch_sizes, found.failed_at) == ((1, 2, 4), None)
    assert (found.coupled.checked, found.coupled.identical) == (3, 3)
    assert "3 of 3 prompts equal under coupled noise at batch sizes 1, 2, 4; " in str(found)


def test_what_is_broken_only_in_batches_is_red_and_the_first_batch_size_named(monkeypatch: pytest.MonkeyPatch) -> None:
    speculate = live.speculate

    def mixed_up(*args: Any, batch_size: int = 1, **how: Any) -> Any:
        made = speculate(*args, batch_size=batch_size, **how)
        if batch_size > 1:  # nothing at 2, the second sequence at 3, and the third too at 4
            for run in made[1 : batch_size - 1]:
                run.tokens[batch_size] = (run.tokens[batch_size] + 1) % toys.VOCAB
        return made

    monkeypatch.setattr(live, "speculate", mixed_up)
    target = toys.target()
    (found,) = sampled_gates(Setup(target, heads("dynamic"), PROMPTS, HOT), TV, 1, [1, 2, 3, 4])
    assert not found.passed
    assert found.distribution is not None
    assert found.distribution.passed
    assert found.failed_at == 3
    assert found.coupled.counts() == {"checked": 3, "identical": 1, "near_tie": 0, "failed": 2}
    assert found.coupled.verdicts == ("identical", "failed", "failed")
    assert "; batch size 3, prompt p1, position 3: token" in str(found)
    assert found.as_dict()["failed_at"] == 3
    (alone,) = sampled_gates(Setup(target, heads("dynamic"), PROMPTS, HOT), TV, 1)
    assert alone.passed


def test_merged_verdicts_are_the_worst_of_each_prompt() -> None:
    near, wrong, later = (Divergence(name, 2, 1, 2, 0.0) for name in ("near", "wrong", "later"))
    gates = [
        verdict_of(["identical", "near_tie", "identical"], [near], []),
        verdict_of(["failed", "identical", "identical"], [], [wrong]),
        verdict_of(["failed", "failed", "identical"], [], [later, wrong]),
    ]
    assert worst(gates) == verdict_of(["failed", "failed", "identical"], [near], [wrong, later])
    assert worst(gates).ties == (near,)
    assert worst(gates).first == wrong
    assert worst(gates[:1]) == gates[0]


def test_a_source_that_drafts_nothing_is_not_drawn() -> None:
    target = toys.target()
    (found,) = sampled_gates(Setup(target, {"nothing": Baseline(target.device)}, PROMPTS, HOT), TV, 1)
    assert found.distribution is None
    assert found.passed
    assert str(found).startswith("nothing at T=1: 3 of 3 prompts equal under coupled noise; no draws: ")


def test_the_verdict_needs_both_parts() -> None:
    law = ChiSquareTest(1000, 2, 7, 6.0, 0.5, TV, 0.9, 1e-3, 0.0)
    green, red = Gate(3, 3, 0, 0), Gate(3, 2, 0, 1)
    assert SampledGate("eagle", 1.0, green, law, "").passed
    assert not SampledGate("eagle", 1.0, red, law, "").passed
    assert not SampledGate("eagle", 1.0, UNCHECKED, law, "").passed
    assert not SampledGate("eagle", 1.0, green, replace(law, p_value=1e-9), "").passed
    assert not SampledGate("eagle", 1.0, green, replace(law, control_p=0.5), "").passed


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_races_gap_is_in_logits_at_any_temperature(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of one value leaves the race to the law: its winner is ahead by what its logit is."""
    target, prompt = toys.target(), PROMPTS[0].token
    params = replace(HOT, rule=COUPLED, sampling=replace(HOT.sampling, temperature=temperature))
    monkeypatch.setattr(rng.RequestRng, "noise", lambda *args: torch.ones_like(args[-1]))
    token = torch.tensor(prompt)[None]
    logits = target.embeddings.logits(target.features(token, torch.zeros_like(token), ()).last_hidden[0, -1])
    first, second = logits.topk(2).values.tolist()
    assert coupled_gap(target, prompt, [], params) == pytest.approx(first - second, rel=1e-3)


@pytest.mark.parametrize(("tv", "draws"), [(0.01, 118_000), (0.02, 30_000), (0.05, 4_700)])
def test_the_sample_size_is_the_published_one_at_26_degrees(tv: float, draws: int) -> None:
    assert samples_needed(26, tv, 1e-3) == pytest.approx(draws, rel=0.02)


def test_cells_hold_the_likely_tokens_and_the_rest() -> None:
    made = group_rare_tokens(torch.tensor([0.01, 0.5, 0.3, 0.01, 0.18]))
    assert made.token == [1, 2, 4]
    assert made.expected == pytest.approx([0.5, 0.3, 0.18, 0.02])
    assert statistic(made, [1, 1, 2, 0, 3]) == pytest.approx(0.1 + 1 / 6 + 0.9 + 36.1, rel=1e-4)  # counts 2, 1, 0, 2


def test_a_rest_too_rare_joins_the_rarest_cell() -> None:
    made = group_rare_tokens(torch.tensor([0.005, 0.6, 0.395]))
    assert made.token == [1]
    assert made.expected == pytest.approx([0.6, 0.4])
    assert made.degrees_of_freedom == 1
    assert group_rare_tokens(torch.tensor([0.0, 1.0])).degrees_of_freedom == 0


def test_thin_cells_raise_the_draws() -> None:
    assert samples_for([Cells([0], [0.5, 0.5]), Cells([0], [0.999, 0.001])], 0.5, 1e-3) == 5000


def test_prefixes_share_the_draws_that_all_their_cells_together_need() -> None:
    one, other = Cells([0, 1], [0.5, 0.3, 0.2]), Cells(list(range(9)), [0.1] * 10)
    wanted = samples_needed(2 + 9, 0.05, 1e-3)
    assert 2 * samples_for([one, other], 0.05, 1e-3) - wanted in (0, 1)


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_it_rejects_as_often_as_it_says(off: float) -> None:
    true = torch.tensor([0.5, 0.3, 0.2])
    drawn_from = true + off * torch.tensor([-1.0, 0.5, 0.5])  # total variation `off`
    of, alpha, trials = group_rare_tokens(true), 0.02, 400
    count = samples_needed(of.degrees_of_freedom, 0.1, alpha)
    generator = torch.Generator().manual_seed(0)
    rejected = 0
    for _ in range(trials):
        drawn = torch.multinomial(drawn_from, count, replacement=True, generator=generator).tolist()
        rejected += p_value(statistic(of, drawn), of.degrees_of_freedom) < alpha
    share, spread = rejected / trials, 4 * (0.25 / trials) ** 0.5
    assert share < alpha + spread / 2 if off == 0 else share > losslessness.POWER - spread


def test_the_winner_of_the_noise_is_what_decoding_chose() -> None:
    target, params = toys.target(), replace(HOT, rule=COUPLED)
    plain = autoregress(target, PROMPTS[0].token, params)
    for place, token in enumerate(plain.tokens):
        assert coupled_gap(target, PROMPTS[0].token, plain.tokens[:place], params) > 0
        request = gates._request(target, PROMPTS[0].token, plain.tokens[:place], params, target.cache())
        probs = gates._probs(request)
        noise = rng.RequestRng(request.rng_key, len(request.token_ids), False).noise(range(1), probs[None])
        assert int((probs / noise[0]).argmax()) == token
