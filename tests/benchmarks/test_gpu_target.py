import itertools
import json
import lzma
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu import target as script
from benchmarks.gpu import text, workloads
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.card import card, curve_rows
from benchmarks.gpu.text import Chat
from examples.tiny import corpus, make_target
from examples.tiny import recipe as recipes
from examples.tiny.recipe import Part, Point, Recipe
from heads.common.resolvers import ROOT
from train.step import Flops

SMALL = Recipe(
    vocab=300, width=32, inner=48, heads=4, kv_heads=2, layers=4, shallow=2, context=64, window=32, batch_tokens=128,
    peak_lr=1e-2, warm_steps=2,
)  # fmt: skip
CHATS = [
    ["How is it going?", "It is going well, so well that I sing.", "Why?", "Why not? I sing what I like."],
    ["def one():", "    return 1\n"],
    ["Où ?", "Là-bas, là où la mer est bleue."],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    sample = [recipes.chat(turns) for turns in CHATS]
    return recipes.make_tokenizer(sample, SMALL, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return recipes.build(SMALL, SMALL.layers, SMALL.vocab).eval()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(recipes.time, "monotonic", lambda: float(next(ticks)))


def test_a_chat_is_what_the_template_renders(tokenizer: PreTrainedTokenizerFast) -> None:
    for turns in CHATS:
        told = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        assert tokenizer.apply_chat_template(told, tokenize=False) == recipes.chat(turns)


def test_the_deep_model_repeats_the_shallow_one() -> None:
    shallow = recipes.build(SMALL, SMALL.shallow, SMALL.vocab)
    deep = recipes.stack(shallow, SMALL, SMALL.vocab)
    assert len(deep.model.layers) == SMALL.layers
    for i, layer in enumerate(deep.model.layers):
        ours, theirs = layer.state_dict(), shallow.model.layers[i % SMALL.shallow].state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert deep.lm_head.weight is deep.model.embed_tokens.weight


def test_training_learns_and_says_how_far_it_came(ticking: None) -> None:
    torch.manual_seed(0)
    stream = torch.arange(7).repeat(200)
    shallow = recipes.build(SMALL, SMALL.layers, SMALL.vocab)
    curve: list[Point] = []
    # The clock is read once a step, and once more at each point of the curve.
    seen = recipes.train(shallow, stream, SMALL, Part(45.0, 1.0, 0.1, 1000), curve)
    assert [point.step for point in curve] == [1, 20, 40]
    assert [point.tokens for point in curve] == [1000 + step * SMALL.batch_tokens for step in (1, 20, 40)]
    assert (seen - 1000) % SMALL.batch_tokens == 0
    assert seen > curve[-1].tokens
    assert curve[-1].loss < 0.5 * curve[0].loss


def test_the_held_out_loss_is_that_of_each_chat_alone(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    nats, count, size = 0.0, 0, 0
    for turns in CHATS:
        told = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        made = tokenizer.apply_chat_template(told, return_dict=True, return_assistant_tokens_mask=True)
        token = torch.tensor([made["input_ids"]])
        labels = token.masked_fill(torch.tensor([made["assistant_masks"]]) == 0, -100)
        mine = int((labels[:, 1:] != -100).sum())
        nats, count = nats + model(input_ids=token, labels=labels).loss.item() * mine, count + mine
        size += sum(len(turn.encode()) for turn in turns[1::2])
    found = recipes.held_out_loss(model, tokenizer, CHATS, 1000)
    assert (found.tokens, found.bytes) == (count, size)
    assert found.nats == pytest.approx(nats, rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert recipes.held_out_loss(model, tokenizer, CHATS, 12).tokens < count


def test_operations_are_those_that_torch_counts() -> None:
    model = recipes.build(SMALL, SMALL.layers, SMALL.vocab)
    model.config._attn_implementation = "eager"  # two plain products, over the whole window
    token = torch.zeros(1, SMALL.window, dtype=torch.long)
    counter: Any = Flops
    with counter() as count:
        model(input_ids=token, labels=token).loss.backward()
    above_the_diagonal = 6.0 * SMALL.layers * SMALL.width * SMALL.window
    ours = script.flops_per_token(SMALL, SMALL.layers, SMALL.vocab) + above_the_diagonal
    angles = 2 * SMALL.window * SMALL.width // SMALL.heads // 2  # of rotary positions, a product in some versions
    assert count.total - ours * SMALL.window in (0, angles)


def test_speeds_leave_out_what_a_step_compiles() -> None:
    times = [(1, 100.0), (20, 101.0), (40, 102.0), (60, 130.0), (80, 131.0)]
    curve = [Point(4, step, step * 100, 1.0, seconds) for step, seconds in times]
    found = script.speeds(curve, SMALL, SMALL.vocab, Bench(torch.device("cpu"), True, Path()))
    assert list(found["speed"]) == ["4"]
    assert found["speed"]["4"]["tokens_per_second"] == 2000.0
    flops = script.flops_per_token(SMALL, 4, SMALL.vocab)
    assert found["speed"]["4"]["mfu"] == pytest.approx(2000.0 * flops / found["product_rate"])


def test_a_passage_is_opened_by_whole_sentences() -> None:
    sentence = "The sea was calm, and the ship went on its way to the north. "
    opening, rest = text.opened(sentence * 8) or ("", "")
    assert opening.endswith("north.")
    assert len(opening) >= text.OPENING
    assert rest.startswith("The sea")
    assert text.opened(sentence) is None
    assert text.opened("a" * 2000) is None


def test_passages_lose_nothing() -> None:
    book = "\n\n".join(f"Paragraph {i}. " + "word " * (40 * (i % 3 + 1)) for i in range(30))
    chats, plain = text.prose(book, "book")
    made = " ".join([*plain, *(turn for chat in chats for turn in chat.turns)])
    assert sorted(made.split()) == sorted(book.split())
    assert len(chats) > 1
    assert len(plain) > len(chats)


def test_a_dialogue_ends_where_turns_stop_alternating() -> None:
    def told(*roles: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]}

    (chat,) = text.dialogue(told("system", "user", "assistant", "user", "assistant"), 3, "x")
    assert chat == Chat("x 3", ["user 1", "assistant 2", "user 3", "assistant 4"])
    (chat,) = text.dialogue(told("user", "assistant", "assistant", "user"), 3, "x")
    assert chat.turns == ["user 0", "assistant 1"]
    assert text.dialogue(told("user", "user", "assistant"), 3, "x") == []


def test_what_is_held_out_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "add_code", lambda *_, **__: None)
    story = "Once there was a {}. " + "It went to the sea and came back again. " * 12
    (tmp_path / "tinystories_10k.txt").write_text("<|endoftext|>".join(story.format(f"cat{i}") for i in range(4)))
    (tmp_path / "tinystories_heldout.txt").write_text(story.format("dog"))
    chats = [
        {"conversations": [{"role": "user", "content": f"q{i}?"}, {"role": "assistant", "content": f"a{i}"}]}
        for i in range(200)
    ]
    with lzma.open(tmp_path / "topical_chat.jsonl.xz", "wt") as file:
        file.write("".join(json.dumps(each) + "\n" for each in chats))
    found = text.gathered(tmp_path)
    assert {each.source for each in found.read} == {path.name for path in tmp_path.iterdir()}
    assert len(found.chats["prose"]) == 4
    kept = found.held_out["dialogue"]
    assert 0 < len(kept) < 20
    assert len(kept) + len(found.chats["dialogue"]) == 200
    trained = "\n".join(found.documents())
    assert "cat3" in trained
    assert len(found.held_out["prose"]) == 1
    assert "dog" not in trained
    assert not any(f">{turn}<" in trained for each in kept for turn in each.turns)


MODULES = [f"x{i} = {i}\n" * 900 for i in range(6)]
FUNCTIONS = [corpus.Function(f"m.py:f{i}", f"def f{i}():", f"    return {i} + {i}\n") for i in range(40)]


def test_code_is_functions_and_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "corpus", lambda: (MODULES, FUNCTIONS[:30], FUNCTIONS[30:]))
    monkeypatch.setattr(text, "MODULES", sum(map(len, MODULES[:3])))
    found = text.gathered(None)
    assert (len(found.chats["code"]), len(found.held_out["code"])) == (30, 10)
    assert set(found.plain) < set(MODULES)
    assert len(found.plain) >= 2
    chats = sum(len(recipes.chat(each.turns)) for each in found.chats["code"])
    assert text.embedded_text().plain == make_target.pieces(MODULES, chats)
    assert found.held_out["prose"] == found.held_out["dialogue"] == []


def test_the_embedded_target_is_made_and_trained_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticking: None
) -> None:
    monkeypatch.setattr(make_target, "corpus", lambda: (MODULES, FUNCTIONS[:30], FUNCTIONS[30:]))
    monkeypatch.setattr(make_target, "EMBEDDED", SMALL)
    words = ["make_target.py", "--out", str(tmp_path), "--minutes", "0.5"]
    seen = []
    for more in ([], ["--more"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        make_target.main()
        told = json.loads((tmp_path / "training.json").read_text())
        seen.append((told["minutes"], told["tokens_seen"], told["held_out_loss"]))
    assert [each[0] for each in seen] == [0.5, 1.0]
    assert seen[1][1] == pytest.approx(2 * seen[0][1], rel=0.1)
    assert seen[0][2] != seen[1][2]
    kept = LlamaForCausalLM.from_pretrained(tmp_path)
    assert (len(kept.model.layers), kept.dtype) == (SMALL.layers, torch.bfloat16)
    assert kept.generation_config.eos_token_id == [3, 0]
    assert len((tmp_path / "held_out.jsonl").read_text().splitlines()) == 10


def test_prompts_with_a_looping_answer_are_passed_over(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"loop": [5, 6, 7, 8, 9, 10] * 9, "short": [5] * 3, "good": list(range(5, 60))}
    kept = [Chat(f"{kind} {i}", [f"{kind} number {i} of many?", "yes"]) for i in range(5) for kind in answers]
    kinds = iter([each.id.split()[0] for each in kept])
    monkeypatch.setattr(workloads, "greedy", lambda *told: [answers[next(kinds)] for _ in told[-1]])
    monkeypatch.setattr(workloads, "PROMPT_TOKENS", (1, 100))
    picked = workloads.choose(None, tokenizer, kept, toy=False)  # greedy alone asks the model
    assert [each["id"] for each in picked.records] == [f"good {i}" for i in range(5)]
    assert picked.counts == {"prompts": 5, "kept_anyway": 0, "loops": 5, "short": 5}
    kinds = iter(["loop"] * 4)
    picked = workloads.choose(None, tokenizer, kept, toy=True)
    assert picked.counts == {"prompts": 2, "kept_anyway": 2, "loops": 4, "short": 0}


def test_training_prompts_keep_a_dialogues_turns_and_leave_out_answers() -> None:
    chats = {"code": [Chat("f", ["def f():", "    pass"])], "prose": [], "dialogue": [Chat("d", list("abcdefgh"))]}
    found = {each["id"]: each for each in workloads.training_prompts(chats, None)}
    assert found["code f"] == {"id": "code f", "prompt": "def f():"}
    assert [each["content"] for each in found["dialogue d"]["messages"]] == list("abcdef")
    assert len(workloads.training_prompts(chats, 1)) == 1


def test_the_curve_in_a_table_ends_with_the_last_point() -> None:
    for count in (1, 9, 10, 11, 95):
        curve = [Point(4, i, i * 1_000_000, float(i), 0.0)._asdict() for i in range(count)]
        rows = curve_rows(curve)
        assert rows[-1][2] == f"{count - 1:.3f}"
        assert len(rows) <= 20
        assert len({row[1] for row in rows}) == len(rows)


@pytest.mark.slow
def test_a_toy_target_is_made_and_a_finished_part_is_not_done_again(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/target.py", "--toy", "--out", str(tmp_path)]
    written = []
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        written.append((tmp_path / "model.safetensors").stat().st_mtime_ns)
    assert written[0] == written[1]
    numbers = json.loads((tmp_path / "measured.json").read_text())
    assert set(numbers["kinds"]) == {"code", "prose", "dialogue"}
    assert numbers["curve"][-1]["loss"] < numbers["curve"][0]["loss"]
    assert numbers["tokens_seen"] == script.TOY.batch_tokens * (numbers["tokens_seen"] // script.TOY.batch_tokens)
    for kind, each in numbers["kinds"].items():
        assert each["perplexity"] == pytest.approx(math.exp(each["nats_per_token"]))
        assert each["perplexity"] < script.TOY.vocab
        lines = (tmp_path / f"{kind}.jsonl").read_text().splitlines()
        assert len(lines) == each["prompts"] >= 2
        assert f"{each['perplexity']:.2f}" in (tmp_path / "README.md").read_text()
    everything = [json.loads(line)["id"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(everything) == sum(each["prompts"] for each in numbers["kinds"].values())
    answered = {json.loads(line)["id"] for line in (tmp_path / "train_prompts.jsonl").read_text().splitlines()}
    assert not {f"code {name}" for name in everything} & answered
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert sum(each.numel() for each in loaded.parameters()) == numbers["parameters"]
    assert card(numbers, "large") == (tmp_path / "README.md").read_text()
