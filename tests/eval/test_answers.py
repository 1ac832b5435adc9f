"""Sample answers: who wrote each piece, and how probable it was, against the target and the heads row by row."""

from typing import Any

import pytest
import torch

from data.text.prompts import Prompt
from eval.inputs.drafters import WrappedDrafter
from eval.live import answers as written
from heads.base import Features
from inference.decode import Generation, Settings, autoregress
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Plain
from inference.verification.sample import GREEDY
from tests import drafting, toys
from tests.eval.stubs import generation
from tests.inference.test_stream import tokenizer

PROMPT = toys.prompt(0)
STEPS = [(4, 2), (4, 0), (4, 3)]
PLACES = [1, 2, 5, 6, 7]  # of the drafted tokens in the answer
DEPTHS = [1, 2, 1, 2, 3]


def answer() -> Generation:
    """Return the target's own text as three steps would have committed it."""
    text = autoregress(toys.target(), PROMPT, Settings(9, GREEDY)).tokens
    assert toys.lively(text)
    run = generation(text, STEPS)
    run.sources = ["prefill", "draft", "draft", "bonus", "bonus", "draft", "draft", "draft", "bonus"]
    return run


def drafter(name: str) -> HeadDrafter:
    """Return a source that drafts with a toy head."""
    head: Any = toys.head(name, toys.target())
    return HeadDrafter(head, toys.TREES["chain"], name)


@torch.inference_mode()
def naive(head: Any, token: list[int], temperature: float) -> list[float]:
    """Return what the head gave each drafted token: it reads the true rows up to the root, then the true path."""
    target = toys.target()
    whole = torch.tensor(token)
    features = target.features(whole[None], torch.zeros_like(whole)[None], head.feature_layers)
    found = []
    for place, depth in zip(PLACES, DEPTHS, strict=True):
        root = len(PROMPT) + place - depth
        rows = Features(*(part[:, :root] for part in features[:4]))
        state, level = drafting.extend(head, None, rows, whole[1 : root + 1])
        for below in range(1, depth):
            path = torch.ones(1, below, dtype=torch.bool)
            level = drafting.expand(head, state, level, whole[root + below][None], torch.tensor([0]), path)
        found.append(float((drafting.logits(head, level)[0] / temperature).softmax(-1)[whole[root + depth]]))
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_targets_probabilities_are_its_own(temperature: float) -> None:
    target, run = toys.target(), answer()
    known = written.chances(target, Plain(target.device), PROMPT, run, temperature)
    model: Any = target.model
    logits = model(torch.tensor([PROMPT + run.tokens])).logits[0, len(PROMPT) - 1 : -1]
    law = (logits / temperature).softmax(-1)
    assert [each.p for each in known] == pytest.approx(law.gather(1, torch.tensor(run.tokens)[:, None])[:, 0], rel=1e-3)
    best = law.topk(3)
    for each, share, ids in zip(known, best.values, best.indices.tolist(), strict=True):
        assert [text for text, _ in each.top] == [f"w{one}" for one in ids]
        assert [value for _, value in each.top] == pytest.approx(share, rel=1e-3)
        assert each.p == each.top[0][1]  # the answer is greedy
    assert {each.q for each in known} == {None}


@pytest.mark.parametrize("name", ["eagle", "eagle pruned", "medusa", "mtp", "block of DSpark"])
def test_the_heads_probabilities_are_those_at_the_depth_of_the_draft(name: str) -> None:
    run, source = answer(), drafter(name)
    q = [each.q for each in written.chances(toys.target(), source, PROMPT, run, 8.0)]
    assert [place for place, each in enumerate(q) if each is not None] == PLACES
    expected = naive(source.head, PROMPT + run.tokens, 8.0)
    assert [q[place] for place in PLACES] == pytest.approx(expected, rel=1e-3)
    assert len(set(expected)) > 2  # those that are not in a small vocabulary have none


def test_laws_are_held_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run, source = answer(), drafter("eagle")
    whole = written.chances(toys.target(), source, PROMPT, run, 1.0)
    monkeypatch.setattr(written, "ROWS", 2)
    parts = written.chances(toys.target(), source, PROMPT, run, 1.0)
    assert [each.top for each in parts] == [each.top for each in whole]
    assert [each.q is None for each in parts] == [each.q is None for each in whole]
    for place in PLACES:
        assert parts[place].q == pytest.approx(whole[place].q, rel=1e-3)


def test_a_source_in_another_still_has_its_head_and_a_long_text_has_no_q(monkeypatch: pytest.MonkeyPatch) -> None:
    run, source = answer(), drafter("eagle")
    known = written.chances(toys.target(), source, PROMPT, run, 1.0)
    assert written.chances(toys.target(), WrappedDrafter(source, "cold", None, cold=True), PROMPT, run, 1.0) == known
    monkeypatch.setattr(written, "LONGEST", len(PROMPT) + len(run.tokens) - 1)
    long = written.chances(toys.target(), source, PROMPT, run, 1.0)
    assert {each.q for each in long} == {None}
    assert [each.p for each in long] == [each.p for each in known]


def test_an_answer_that_ends_inside_a_draft() -> None:
    run = answer()
    run.tokens, run.sources = run.tokens[:7], run.sources[:7]
    run.steps[-1] = run.steps[-1]._replace(accepted=2, committed=2)
    known = written.chances(toys.target(), drafter("eagle"), PROMPT, run, 1.0)
    assert [place for place, each in enumerate(known) if each.q is not None] == PLACES[:4]


def test_answers_say_who_wrote_each_piece_and_how_probable_it_was() -> None:
    run, target = answer(), toys.target()
    made = {name: [[run, generation(2, [(0, 0)])]] * 5 for name in ("eagle", "plain")}
    prompts = [Prompt(f"p{i}", PROMPT, "") for i in range(5)]
    sources = {"eagle": drafter("eagle"), "plain": Plain(target.device)}
    found = written.answers(made, sources, prompts, target, 0.0)
    assert [(each["prompt"], each["drafter"]) for each in found][:3] == [
        ("p0", "eagle"),
        ("p0", "plain"),
        ("p1", "eagle"),
    ]
    assert len(found) == 2 * written.ANSWERS
    pieces = found[0]["pieces"]
    assert [piece["source"] for piece in pieces] == run.sources
    assert [piece["step"] for piece in pieces] == [0, 1, 1, 1, 2, 3, 3, 3, 3]
    assert "".join(piece["text"] for piece in pieces) == target.tokenizer.decode(run.tokens)
    at_one = written.chances(target, sources["eagle"], PROMPT, run, 1.0)  # of a greedy answer
    assert [(piece["p"], piece["q"], piece["top"]) for piece in pieces] == [(one.p, one.q, one.top) for one in at_one]
    warm = written.answers(made, sources, prompts, target, 0.5)[0]["pieces"]
    assert warm[0]["p"] == written.chances(target, sources["eagle"], PROMPT, run, 0.5)[0].p != at_one[0].p


def test_a_character_of_several_tokens_has_what_is_known_of_the_last() -> None:
    ids = tokenizer()("a🦆").input_ids
    run = generation(ids, [(2, 1), (2, 1)])
    run.sources = ["prefill", "draft", "bonus", "draft", "bonus"]
    known = [written.Chance(place / 10, None, []) for place in range(5)]
    assert written.pieces(run, tokenizer(), known) == [
        {"text": "a", "source": "prefill", "step": 0, "p": 0.0, "q": None, "top": []},
        {"text": "🦆", "source": "bonus", "step": 2, "p": 0.4, "q": None, "top": []},
    ]
    cut = generation(ids[:-1], [(2, 2)])
    assert [piece["text"] for piece in written.pieces(cut, tokenizer(), known[:4])] == ["a", "\ufffd"]


def test_control_characters_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target()
    monkeypatch.setattr(type(target.tokenizer), "decode", lambda *_, **__: "\x1b[2J\u009b")
    known = written.chances(target, Plain(target.device), PROMPT, answer(), 1.0)
    assert {text for each in known for text, _ in each.top} == {"\ufffd[2J\ufffd"}
