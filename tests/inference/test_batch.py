"""A batch gives each request what it would get alone, whoever else comes and goes beside it."""

import functools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import Features
from inference.batch import Batch, batch_of
from inference.decode import Generation, RequestParams, speculate
from inference.drafters import head as head_source
from inference.drafters.head import HeadDrafter, MtpDrafter
from inference.drafters.hybrid import Hybrid
from inference.drafters.plain import Baseline
from inference.protocol import Drafter
from inference.target.cache import CAPACITY_MULTIPLE, Storage
from inference.target.model import TargetOutput
from inference.target.target import Target, check_memory
from inference.verification.sample import GREEDY, Sampling
from tests import assistants, toys
from tests.inference import model_free, test_early_exit, test_mtp, test_streams
from tests.inference.test_mirror import mirror

DOUBLE = torch.float64
LENGTHS = (7, 1, 19)
T1 = Sampling(1.0, 0, 1.0)


def mtp(target: Target, near: str) -> Drafter:
    folder = test_mtp.save(Path(near) / "mtp", "behind")
    return MtpDrafter(MtpDrafter.Config(str(folder), toys.TREES["dynamic"]), target, "mtp")


def hybrid(target: Target) -> Hybrid:
    lookup = model_free.make("suffix", target)
    return Hybrid(Hybrid.Config(0.3, 0.3, {}), toys.drafter("eagle", target, "dynamic"), lookup, "hybrid")


def tli(target: Target, near: str) -> Drafter:
    return assistants.assistant(near, target, match="tli", tree=toys.TREES["sampled"])


# One of every way of drafting: chains, trees, riders, another model, a second thread, a choice of two, the target.
DRAFTERS: dict[str, Callable[[Target, str], Drafter]] = {
    "plain": lambda target, _: Baseline(target.device),
    "sampled": lambda target, _: toys.drafter("eagle", target, "sampled"),
    "prompt_lookup": lambda target, _: model_free.make("prompt_lookup", target),
    "suffix_cold": lambda target, _: model_free.make("suffix_cold", target),
    "lookahead": lambda target, _: model_free.make("lookahead", target),
    "recycling": lambda target, _: model_free.make("recycling", target),
    "assistant": lambda target, near: assistants.assistant(near, target, tree=toys.TREES["sampled"]),
    "mirror": lambda target, near: mirror(near, target, 3),
    "hybrid": lambda target, _: hybrid(target),
    "tli": tli,
    "mtp": mtp,
    "early_exit": lambda target, near: test_early_exit.early_exit(target, Path(near), "tree"),
    "layer_skip": lambda target, near: test_early_exit.layer_skip(target, Path(near), "0.3"),
    "streams": lambda *_: test_streams.source(toys.TREES["dynamic"], DOUBLE),
}
LEARNS = ("recycling", "hybrid")  # their drafts depend on who came before
RARELY = ("plain", "prompt_lookup", "suffix_cold", "lookahead", "recycling")  # of whose drafts few are accepted


def requests(sampling: Sampling) -> tuple[list[list[int]], list[RequestParams]]:
    """Return prompts of several lengths, each with a length and a seed of its own."""
    prompts = [toys.prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    return prompts, [RequestParams(9 + 5 * (seed % 3), sampling, seed=seed) for seed in range(len(prompts))]


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_request_is_decoded_as_if_alone(near: str, name: str) -> None:
    """Sampled; the greedy text of every source is transformers', below."""
    target = toys.target("llama", DOUBLE)
    prompts, settings = requests(T1)
    source = DRAFTERS[name](target, near)
    alone = [speculate(target, source, prompt, each) for prompt, each in zip(prompts, settings, strict=True)]
    made = speculate(target, DRAFTERS[name](target, near), prompts, settings, batch_size=2)
    assert [one.finish_reason for one in made] == ["length"] * len(prompts)
    assert all(one.latency_s >= one.prefill_s > 0 for one in made)
    assert [one.tokens for one in made] == [one.tokens for one in alone]
    if name not in LEARNS:
        assert [steps(one) for one in made] == [steps(one) for one in alone]


def steps(made: Generation) -> list[tuple[int, int, int]]:
    return [(step.drafted, step.accepted, step.committed) for step in made.steps]


def test_tokens_are_reported_as_they_come_under_their_prompts_number() -> None:
    target, told = toys.target(), dict[int, list[int]]()
    prompts, settings = requests(GREEDY)
    calls = []

    def tell(number: int, tokens: list[int], written: list[str]) -> None:
        assert len(tokens) == len(written)
        told.setdefault(number, []).extend(tokens)
        calls.append(number)

    made = speculate(target, toys.drafter("eagle", target, "chain"), prompts, settings, tell, batch_size=2)
    assert [told[number] for number in range(len(prompts))] == [one.tokens for one in made]
    assert {0, 1} == set(calls[:2])
    assert calls.index(2) > 2, "no more than two at a time"


def test_what_a_clone_learns_is_its_own() -> None:
    target = toys.target()
    for name in ("suffix", "recycling"):
        source = model_free.make(name, target)
        decoded(source, 0)
        before = memory(source)
        assert before == memory(source.clone())
        decoded(source.clone(), 1)
        assert memory(source) == before
    both = hybrid(target)
    other = both.clone()
    decoded(other, 0)
    assert both.record == hybrid(target).record != other.record
    assert other.lookup is not both.lookup


def decoded(source: Any, seed: int) -> None:
    """Decode a prompt, and begin another so that the first is remembered."""
    speculate(toys.target(), source, toys.prompt(seed) * 3, RequestParams(20, GREEDY))
    getattr(source, "lookup", source).start([1])


def memory(source: Any) -> Any:
    return dict(source.candidates) if hasattr(source, "candidates") else [list(text) for text in source.past.texts]


def test_a_storage_that_grows_holds_what_it_held() -> None:
    storage, entries = Storage(2, {}), torch.zeros(1, 2, 4, 8)
    before = [buffer.normal_().clone() for buffer in storage.fit(0, entries, entries, 4)]
    storage.reserve(3 * storage.capacity)
    for old, new in zip(before, storage.fit(0, entries, entries, 4), strict=True):
        assert new.shape[2] >= 3 * old.shape[2]
        assert torch.equal(new[:, :, : old.shape[2]], old)


@pytest.mark.parametrize("name", ["plain", "prompt_lookup", "sampled"])
def test_a_user_waits_for_the_prefill_too_and_pays_a_share_of_each_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of which a prompt takes a million, the head's drafts of a pass 10,000, a pass 1,000, a reading 1."""
    now, parts = [0.0], ((Target, "prefill", 10**6), (head_source, "grow_batch", 10**4), (Target, "run", 10**3))

    def slowed(run: Callable[..., Any], seconds: int) -> Callable[..., Any]:
        def slow(*values: Any, **named: Any) -> Any:
            now[0] += seconds
            return run(*values, **named)

        return slow

    def read() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(time, "perf_counter", read)
    for where, part, seconds in parts:
        monkeypatch.setattr(where, part, slowed(getattr(where, part), seconds))
    target = toys.target()
    prompts, ways = (
        requests(GREEDY)[0][:2],
        [RequestParams(9, GREEDY), RequestParams(9, GREEDY if name == "plain" else T1)],
    )
    made = speculate(target, DRAFTERS[name](target, ""), prompts, ways, batch_size=2)
    assert all(one.latency_s > one.prefill_s > 10**6 > one.decode_s > 0 for one in made)
    groups = 1 if name == "plain" else 2  # those that are sampled otherwise have a pass of their own
    passes = groups * max(len(one.steps) for one in made) * (1000 + 10_000 * (name == "sampled"))
    assert 0.8 < sum(one.decode_s for one in made) / passes < 1.3


CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "batch_memory.py"


def buffers(batch: Batch) -> list[Tensor]:
    """Return all keys and values that are allocated."""
    cache = getattr(batch.draft_batch, "cache", None)
    return [*batch.cache.storage.blocks, *(half for pair in (cache.layers if cache else ()) for half in pair)]


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 4) for name in ("plain", "eagle", "medusa", "block", "eagle3 injected")), ("mtp", 24)]
)
def test_keys_and_values_are_those_of_the_lengths_asked_for(name: str, size: int) -> None:
    target = toys.target("llama")
    drafter: Drafter = Baseline(CPU) if name == "plain" else toys.drafter(name, target, "dynamic")
    requests = [(toys.prompt(i, 3 + i % 17), RequestParams(4 + 2 * (i % 4), GREEDY)) for i in range(size + 3)]
    batch = batch_of(target, drafter, size, requests)
    planned, waiting, addresses = batch.nbytes, list(enumerate(requests)), list[int]()
    assert buffers(batch) == []
    longest = max(len(prompt) + settings.max_new_tokens for prompt, settings in requests)
    entry = 2 * 3 * 2 * 8 * 4  # bytes: keys and values, layers, groups, width, fp32
    assert 0 <= batch.cache.storage.nbytes[CPU] / (size * entry) - longest - 64 < CAPACITY_MULTIPLE
    while waiting or batch.running:
        if waiting and batch.free:
            number, request = waiting.pop(0)
            batch.admit(number, *request)
        else:
            batch.step()
            addresses = addresses or [buffer.data_ptr() for buffer in buffers(batch)]
        batch.release()
    assert planned == batch.nbytes == Counter({CPU: sum(buffer.nbytes for buffer in buffers(batch))})
    assert [buffer.data_ptr() for buffer in buffers(batch)] == addresses


def test_a_batch_beyond_the_devices_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10**9)
    check_memory({CUDA: 4 * 10**9, CPU: 10**15}, "a target", 32)
    line = r"^a target: the keys and values of a batch of 32 take 4\.1 GB, and cuda:0 has 4\.0 GB free: give a smaller"
    with pytest.raises(ValueError, match=line):
        check_memory({CUDA: 41 * 10**8}, "a target", 32)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8", "32"])
def test_a_process_takes_what_is_planned(size: str) -> None:
    run = subprocess.run([sys.executable, BENCHMARK, "--batch", size], capture_output=True, text=True, check=True)
    planned, peak = (float(word) for word in run.stdout.split()[-2:])
    assert 0.9 < peak / planned < 1.1


@functools.cache
def generated(number: int, length: int, tokens: int, penalty: float) -> list[int]:
    """Return what transformers' own `generate` writes after a prompt."""
    target, prompt = toys.target("llama", DOUBLE), torch.tensor([toys.prompt(number, length)])
    generate: Any = target.model.generate
    made = generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False, eos_token_id=END,
        pad_token_id=END, repetition_penalty=penalty,
    )  # fmt: skip
    return made[0, length:].tolist()


END = 11


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_source_writes_what_transformers_writes(
    near: str, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of other lengths, penalties, seeds and stops than those that they share a pass with; some end early."""
    target = toys.target("llama", DOUBLE)
    drafter = DRAFTERS[name](target, near)
    monkeypatch.setattr(target, "eos", frozenset({END}))
    shapes = [(i, 3 + 5 * (i % 4), 6 + 3 * (i % 5), 1.4 if i % 3 == 2 else 1.0) for i in range(10)]
    expected, finishes, settings = list[list[int]](), list[str](), list[RequestParams]()
    for i, (number, length, tokens, penalty) in enumerate(shapes):
        text = generated(number, length, tokens, penalty)
        stop = f"w{text[2]} w{text[3]}" if i % 4 == 1 and len(text) > 4 else None
        ends = next((n for n in range(1, len(text) + 1) if stop and stop in target.tokenizer.decode(text[:n])), None)
        finishes.append("stop" if ends else "eos" if text[-1] == END else "length")
        expected.append(text[:ends])
        sampling = Sampling(0.0, 0, 1.0, repetition_penalty=penalty)
        settings.append(RequestParams(tokens, sampling, stop=(stop,) if stop else (), seed=i))
    made = speculate(target, drafter, [toys.prompt(*one[:2]) for one in shapes], settings, batch_size=size)
    assert [one.tokens for one in made] == expected
    assert [one.finish_reason for one in made] == finishes
    assert {*finishes} == {"stop", "eos", "length"}
    assert sum(step.accepted for one in made for step in one.steps) > 0 or name in RARELY


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_head_takes_in_rows_of_a_step_that_it_did_not_draft(kind: str) -> None:
    """As in a hybrid, whose lookup drafts several steps in turn."""
    target = toys.target()
    drafter = HeadDrafter(toys.head(kind, target), toys.TREES["chain"], "head")
    text = toys.prompt(0, 20)
    layers = drafter.head.feature_layers
    out = target.prefill(torch.tensor(text[:-1]), target.cache(len(text)), layers)
    whole, stepwise = drafter.batch(1), drafter.batch(1)
    whole.start_sequence(0, text, out)
    stepwise.start_sequence(0, text[:10], TargetOutput(out.hidden[:, :9], out.last_hidden[:, :9], None))
    for begin, end in ((9, 12), (12, 15), (15, 19)):
        token = torch.tensor([text[begin + 1 : end + 1]])
        rows = Features(token, out.hidden[:, begin:end], out.last_hidden[:, begin:end], torch.zeros_like(token))
        stepwise.begin([None], begin)
        stepwise.commit(rows, torch.tensor([end - begin]))
    torch.testing.assert_close(stepwise.buffers.logits, whole.buffers.logits, rtol=1e-4, atol=1e-4)
