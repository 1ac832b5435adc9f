import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.answers.engine import Engine, drafter_of
from data.answers.files import Worker, source_of, write_answers
from data.config import DataConfig
from data.text.records import Record, parse
from data.text.template import encode, render
from heads.common.resolvers import ROOT
from heads.eagle import Eagle
from heads.formats.store import save_head
from inference.drafters.plain import Baseline
from inference.target.target import Target
from inference.verification.sample import Sampling
from tests import toys
from tests.data import answering
from tests.data.answering import LENGTH, chat, records, settings, work
from tests.data.asking import lines
from tests.data.chatml import load_samples
from tests.data.families import trained

SUFFIX = {
    "depth": 16, "tokens": 8, "factor": 1.0, "offset": 0.0, "min_probability": 0.1, "memory": True,
    "memory_nodes": 1000,
}  # fmt: skip
LOOKUP = {"ngram_min": 1, "ngram_max": 2, "tokens": 4, "match": "last"}
DRAFTERS: dict[str, Any] = {"plain": {}, "suffix": SUFFIX, "prompt_lookup": LOOKUP}
NO_TREE = dict.fromkeys(("kind", "depth", "top_k", "nodes", "paths", "widths"))


def engine(how: Any = None, batch_size: int = 3, drafter: str = "plain", of: Target | None = None) -> Engine:
    target = of or answering.target()
    return Engine(
        target, drafter_of({drafter: DRAFTERS[drafter]}, None, NO_TREE, target), how or settings(), batch_size
    )


def answer(out: Path, how: Any = None, of: list[Record] | None = None, **changed: Any) -> list[dict[str, Any]]:
    write_answers(work(records() if of is None else of, how), engine(how, **changed), out)
    return lines(out)


def meta(out: Path) -> dict[str, Any]:
    return json.loads(out.with_name(out.name + ".meta.json").read_text())


def greedy(record: Record, target: Target) -> list[str]:
    """Answer a chat's turns step by step without a cache."""
    said: list[Any] = []
    answers = []
    for question in [message for message in record.messages if message["role"] == "user"]:
        said.append(question)
        (token,) = encode([render(said, target.tokenizer, True)], target.tokenizer)
        made: list[int] = []
        while len(made) < LENGTH and not target.eos & set(made):
            made.append(int(target.model(torch.tensor([token + made])).logits[0, -1].argmax()))
        ended = made[-1] in target.eos
        answers.append(str(target.tokenizer.decode(made[:-1] if ended else made)))
        said.append({"role": "assistant", "content": answers[-1]})
        if not ended:
            break
    return answers


def test_each_turn_is_answered_in_view_of_the_targets_own_answers(tmp_path: Path) -> None:
    expected = [greedy(record, answering.target()) for record in records()]
    assert len({text for answers in expected for text in answers}) > 8
    assert {len(answers) for answers in expected} == {1, 2, 3}
    made = answer(tmp_path / "a.jsonl")
    for record, line, answers in zip(records(), made, expected, strict=True):
        assert line["id"] == record.id
        assert [m["content"] for m in line["messages"] if m["role"] == "assistant"] == answers
        asked = [m for m in record.messages if m["role"] == "user"][: len(answers)]
        assert [m for m in line["messages"] if m["role"] == "user"] == asked
    assert meta(tmp_path / "a.jsonl")["counts"]["answers"] == sum(map(len, expected))
    assert meta(tmp_path / "a.jsonl")["settings"]["target"]["dtype"] == "torch.float32"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_drafter_and_processes_leave_the_bytes_alone(temperature: float, tmp_path: Path) -> None:
    how = settings(temperature)
    assert engine(how).sampling == Sampling(temperature, 0, 0.9)
    answer(tmp_path / "one", how, batch_size=1)
    expected = (tmp_path / "one").read_bytes()
    for name, changed in {
        "batch": {"batch_size": 4},
        "suffix": {"drafter": "suffix"},
        "lookup": {"drafter": "prompt_lookup", "batch_size": 2},
    }.items():
        answer(tmp_path / name, how, **changed)
        assert (tmp_path / name).read_bytes() == expected
    together(tmp_path / "ranks", how, 3)
    assert (tmp_path / "ranks").read_bytes() == expected
    answer(tmp_path / "seed", settings(temperature, seed=1))
    assert ((tmp_path / "seed").read_bytes() == expected) == (temperature == 0)


def together(out: Path, how: Any, world: int) -> None:
    """Answer with several processes' shares, as threads with an engine each."""
    barrier = threading.Barrier(world)
    engines = [engine(how, 2, of=Target(answering.model(), answering.words(), "toy")) for _ in range(world)]

    def run(rank: int) -> None:
        write_answers(work(records(), how), engines[rank], out, Worker(rank, world, barrier.wait))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_longer_call_goes_on_and_a_trained_head_drafts_with_the_same_bytes(tmp_path: Path) -> None:
    how = settings(1.0)
    answer(tmp_path / "whole", how)
    answer(tmp_path / "grown", how, records()[:4])
    answer(tmp_path / "grown", how, drafter="suffix", batch_size=2)
    assert (tmp_path / "grown").read_bytes() == (tmp_path / "whole").read_bytes()
    assert meta(tmp_path / "grown")["settled_before"] == 4
    answer(tmp_path / "grown", how, records()[:2])
    assert (tmp_path / "grown").read_bytes() == (tmp_path / "whole").read_bytes()
    assert meta(tmp_path / "grown")["counts"] == meta(tmp_path / "whole")["counts"]
    target = answering.target()
    config = Eagle.Config(name="eagle", **toys.HEAD_CONFIGS["eagle"])
    save_head(tmp_path / "run" / "head", Eagle(config, target.embeddings), target.spec, vars(toys.TREES["chain"]))
    drafter = drafter_of({"plain": {}}, str(tmp_path / "run"), NO_TREE, target)
    assert drafter.tree == "chain-4"
    write_answers(work(records(), how), Engine(target, drafter, how, 2), tmp_path / "head")
    assert (tmp_path / "head").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_turn_that_does_not_fit_ends_the_chat_there(tmp_path: Path) -> None:
    long = " ".join(["w7"] * 80)
    chats = [chat("0", long), chat("1", "w1", long), chat("2", "w2")]
    made = answer(tmp_path / "a", settings(max_new_tokens=20), chats)
    assert [(line["id"], len(line["messages"])) for line in made] == [("1", 2), ("2", 2)]
    noted = meta(tmp_path / "a")
    assert (noted["shortened"]["context"], noted["left_out"]) == (["1"], {"context": ["0"]})
    with pytest.raises(ValueError, match=r"none of 1 chats was answered: 1 context \(the next prompt leaves no room"):
        answer(tmp_path / "b", settings(max_new_tokens=20), chats[:1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.meta.json"]


def test_a_token_that_the_target_lacks_costs_its_turn_alone(tmp_path: Path) -> None:
    tokenizer = answering.words.__wrapped__()
    tokenizer.add_tokens(["beyond"])
    text = parse({"id": "3", "text": "w1 beyond w3 w4"}, 0, "f")
    chats = [chat("0", "beyond"), chat("1", "w5", "beyond"), chat("2", "w2"), text]
    write_answers(work(chats), engine(of=Target(answering.model(), tokenizer, "toy")), tmp_path / "a")
    assert [(line["id"], len(line["messages"])) for line in lines(tmp_path / "a")] == [("1", 2), ("2", 2)]
    noted = meta(tmp_path / "a")
    assert (noted["shortened"]["refused"], noted["left_out"]) == (["1"], {"refused": ["0", "3"]})


def test_no_end_token_and_two_drafters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = answering.target()
    monkeypatch.setattr(target, "eos", frozenset())
    with pytest.raises(ValueError, match="set keep_unfinished=true"):
        engine(settings(keep_unfinished=False))
    for options, run, message in (
        (DRAFTERS, None, "one source drafts the answers"),
        ({"head": {}}, None, "drafter=head needs run="),
        ({"suffix": SUFFIX}, "outputs/x", "give one of the two"),
        ({"nonesuch": {}}, None, "no drafter is called 'nonesuch'"),
    ):
        with pytest.raises(ValueError, match=message):
            drafter_of(options, run, NO_TREE, target)
    assert isinstance(drafter_of({"plain": {}}, None, NO_TREE, target), Baseline)


def test_what_was_written_is_trained_on_whole_and_in_place(tmp_path: Path, config: Callable[..., DataConfig]) -> None:
    tokenizer = answering.words()
    made = answer(tmp_path / "a.jsonl")
    samples = load_samples(config(str(tmp_path / "a.jsonl")), tokenizer)
    assert [sample.id for sample in samples] == [line["id"] for line in made]
    for sample, line in zip(samples, made, strict=True):
        answers = [m for m in line["messages"] if m["role"] == "assistant"]
        ended = [m["content"] + " <|end|>" * ("finish_reason" not in m) for m in answers]
        assert [run.strip() for run in trained(sample, tokenizer)] == ended
        assert list(sample.token) == encode([render(line["messages"], tokenizer, False)], tokenizer)[0]


def test_an_opening_turn_is_no_answer_in_a_second_call_either(tmp_path: Path) -> None:
    messages = [{"role": role, "content": "w1"} for role in ("assistant", "user", "assistant")]
    for _ in range(2):
        answer(tmp_path / "a.jsonl", of=[parse({"id": "o", "messages": messages}, 0, "f")])
        assert meta(tmp_path / "a.jsonl")["counts"]["answers"] == 1


def test_a_target_without_template_writes_plain_text(
    write: Callable[..., str], tmp_path: Path, config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = answering.target()
    bare = answering.words(None)
    monkeypatch.setattr(target, "tokenizer", bare)
    record = parse({"id": "t", "text": "w1 w2 w3 w4"}, 0, "f")
    (line,) = answer(tmp_path / "a.jsonl", of=[record])
    assert answer(tmp_path / "a.jsonl", of=[record]) == [line]
    assert meta(tmp_path / "a.jsonl")["counts"]["answers"] == 1
    assert line["prompt"] == "w1 w2"
    assert line["text"] == line["prompt"] + " " + line["answer"]
    (sample,) = load_samples(config(str(tmp_path / "a.jsonl")), bare)
    assert all(sample.loss_mask)
    assert bare.decode(sample.token[:-1]) == line["text"]


def test_what_shapes_the_prompts_tells_them_apart(write: Callable[..., str], config: Callable[..., DataConfig]) -> None:
    folder = Path(write({"text": "a"}, name="a.jsonl")).parent
    paths, told = (str(folder / "a.jsonl"), str(folder), str(folder / "*.jsonl")), list[Any]()
    for text in ("a", "a", "b"):
        write({"text": text}, name="a.jsonl")
        told.append([source_of(config(path)) for path in paths])
    assert told[0] == told[1]
    assert all(one != other for one, other in zip(*told[1:], strict=True))
    assert source_of(config(write({"text": "b"}, name="other.jsonl"))) == source_of(config(paths[0]))
    two = ["me/hub", "me/other"]
    told = [
        source_of(config(path, **changed))
        for path, changed in (
            (two, {}), (two[::-1], {}), ("me/hub", {}), ("me/other", {}), ("me/hub", {"split": "test"}),
            ("me/hub", {"held_out": 2}), ("me/hub", {"held_out": 3}), ("me/hub", {"seed": 9}),
            ("me/hub", {"streaming": True, "limit": 1}),
            (two, {"weights": [1.0, 2.0]}), (two, {"weights": [2.0, 1.0]}),
        )
    ]  # fmt: skip
    assert all(one != other for i, one in enumerate(told) for other in told[:i])
    assert source_of(config("me/hub", held_out=2, prompts="p")) == source_of(config("me/hub", prompts="p"))


@pytest.mark.slow
def test_two_processes_write_what_one_does(write: Callable[..., str], tmp_path: Path) -> None:
    answering.model().save_pretrained(tmp_path / "toy")
    answering.words().save_pretrained(tmp_path / "toy")
    chats = write(*({"id": record.id, "messages": record.messages} for record in records()))
    for name, launcher in (("one", []), ("two", ["-m", "torch.distributed.run", "--nproc_per_node=2"])):
        subprocess.run(
            [sys.executable, *launcher, str(ROOT / "data" / "run.py"), f"model.path={tmp_path / 'toy'}",
             "model.device=cpu", "model.dtype=float32", f"data.path={chats}", "data.held_out=0", "keep_unfinished=true",
             f"answers={tmp_path / name}.jsonl", f"max_new_tokens={LENGTH}"],
            check=True, cwd=ROOT, timeout=200,
        )  # fmt: skip
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert one.read_bytes() == two.read_bytes()
    assert (meta(one)["world_size"], meta(two)["world_size"]) == (1, 2)
