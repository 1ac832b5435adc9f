"""Sample answers: who wrote each piece."""

from data.text.prompts import Prompt
from eval.live import extras
from inference.decode import Generation, Settings, autoregress
from inference.verification.sample import GREEDY
from tests import toys
from tests.eval.stubs import generation
from tests.inference.test_run import tokenizer

PROMPT = toys.prompt(0)


def answer() -> Generation:
    """Return the target's own text as three steps would have committed it."""
    text = autoregress(toys.target(), PROMPT, Settings(9, GREEDY)).tokens
    assert toys.lively(text)
    run = generation(text, [(4, 2), (4, 0), (4, 3)])
    run.sources = ["prefill", "draft", "draft", "bonus", "bonus", "draft", "draft", "draft", "bonus"]
    return run


def test_answers_say_who_wrote_each_piece() -> None:
    run, target = answer(), toys.target()
    made = {name: [[run, generation(2, [(0, 0)])]] * 5 for name in ("eagle", "plain")}
    prompts = [Prompt(f"p{i}", PROMPT, "") for i in range(5)]
    found = extras.answers(made, ["eagle", "plain"], prompts, target.tokenizer)
    assert [(each["prompt"], each["drafter"]) for each in found][:3] == [
        ("p0", "eagle"),
        ("p0", "plain"),
        ("p1", "eagle"),
    ]
    assert len(found) == 2 * extras.ANSWERS
    pieces = found[0]["pieces"]
    assert [piece["source"] for piece in pieces] == run.sources
    assert [piece["step"] for piece in pieces] == [0, 1, 1, 1, 2, 3, 3, 3, 3]
    assert "".join(piece["text"] for piece in pieces) == target.tokenizer.decode(run.tokens)


def test_a_character_of_several_tokens_has_what_is_known_of_the_last() -> None:
    ids = tokenizer()("a🦆").input_ids
    run = generation(ids, [(2, 1), (2, 1)])
    run.sources = ["prefill", "draft", "bonus", "draft", "bonus"]
    assert extras.pieces(run, tokenizer()) == [
        {"text": "a", "source": "prefill", "step": 0},
        {"text": "🦆", "source": "bonus", "step": 2},
    ]
    cut = generation(ids[:-1], [(2, 2)])
    assert [piece["text"] for piece in extras.pieces(cut, tokenizer())] == ["a", "\ufffd"]
