"""The Arrow cache: made once, mapped by all, never stale, never half there."""

import errno
import json
import logging
import multiprocessing
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast as Tokenizer

from data import prompts
from data.cache import META, PROMPTS, SAMPLES, CachedSamples, cache_key, tokenizer_identity
from data.config import DataConfig
from data.masks import Sample
from data.prompts import load_samples, load_training
from tests.data.chatml import PLAIN, TAGGED, Tokens
from train import launch
from train.config import LauncherConfig

Config = Callable[..., DataConfig]
Write = Callable[..., str]

ROOT = Path(__file__).resolve().parents[2]
RECORDS = [{"id": f"r{i}", "prompt": f"why {i}", "answer": "so " * (i % 7 + 1)} for i in range(60)]


@pytest.fixture
def cached(write: Write, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Return a configuration with a cache, for more records than are written at once."""
    monkeypatch.setattr("data.cache.BATCH", 25)
    return config(write(*RECORDS), cache=str(tmp_path / "cache"), held_out=3)


def place(config: DataConfig) -> Path:
    """Return the only folder in the cache."""
    (found,) = [path for path in Path(str(config.cache)).iterdir() if path.is_dir()]
    return found


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokenising fail from now on."""

    def tokenise(*_: Any) -> list[Sample]:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(prompts, "samples_of", tokenise)


def test_cached_data_are_the_data(cached: DataConfig, config: Config, chat: Tokenizer) -> None:
    plain = load_training(config(cached.path, held_out=3), chat, 2)
    for _ in range(2):
        data = load_training(cached, chat, 2)
        assert isinstance(data.samples, CachedSamples)
        assert list(data.samples) == plain.samples
        assert (data.held_out, data.counts) == (plain.held_out, plain.counts)
    assert len(plain.held_out) == 2
    assert len(load_training(cached, chat, 9).held_out) == 3


def test_cached_samples_are_a_sequence(cached: DataConfig, config: Config, chat: Tokenizer) -> None:
    samples, plain = load_samples(cached, chat), load_samples(config(cached.path, held_out=3), chat)
    assert len(samples) == len(plain) == 57
    assert samples[0] == plain[0]
    assert samples[-1] == plain[-1]
    assert samples[24:27] == plain[24:27]
    with pytest.raises(IndexError):
        samples[57]
    assert isinstance(samples, CachedSamples)
    arrays = [(token.tolist(), mask.tolist()) for token, mask in samples.arrays()]
    assert arrays == [(sample.token, sample.mask) for sample in plain]


def test_a_second_run_tokenises_nothing(cached: DataConfig, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(load_samples(cached, chat))
    refuse(monkeypatch)
    assert list(load_samples(cached, chat)) == first
    with pytest.raises(AssertionError, match="tokenised again"):
        load_samples(cached, chat, limit=2)


def test_held_out_records_are_not_needed(write: Write, config: Config, chat: Tokenizer, tmp_path: Path) -> None:
    kept = config(write(*RECORDS[:9]), cache=str(tmp_path / "cache"))
    assert [load_training(kept, chat, 5).held_out for _ in range(2)] == [[], []]
    asked = config(kept.path, cache=kept.cache, prompts=write({"id": "p", "prompt": "x"}, name="asked.jsonl"))
    assert [[p.id for p in load_training(asked, chat, 5).held_out] for _ in range(2)] == [["p"], ["p"]]


@pytest.mark.parametrize(
    "changed",
    [{"limit": 5}, {"max_tokens": 9}, {"min_tokens": 2}, {"dedup": False}, {"contamination": 4}, {"held_out": 1},
     {"split": "test"}, {"seed": 1}, {"prompts": "p.jsonl"}, {"streaming": True, "limit": 5}],
)  # fmt: skip
def test_every_option_that_shapes_samples_is_in_the_key(
    config: Config, chat: Tokenizer, changed: dict[str, Any]
) -> None:
    assert cache_key(config("f"), chat, []) != cache_key(config("f", **changed), chat, [])


def test_what_shapes_no_sample_is_not_in_the_key(config: Config, chat: Tokenizer) -> None:
    assert cache_key(config("f"), chat, ["a"]) == cache_key(config("f", length=7, cache="c"), chat, ["a"])
    assert cache_key(config("f"), chat, ["a"]) != cache_key(config("f"), chat, ["b"])


def test_a_tokenizer_that_changes_under_the_cache_finds_nothing_stale(
    cached: DataConfig, config: Config, tokenizer_with: Tokens
) -> None:
    def spaced(tokenizer: Tokenizer) -> None:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)

    def other_template(tokenizer: Tokenizer) -> None:
        tokenizer.chat_template = TAGGED.replace("user", "USER")

    def other_end(tokenizer: Tokenizer) -> None:
        tokenizer.eos_token = "<|endoftext|>"

    def more(tokenizer: Tokenizer) -> None:
        tokenizer.add_tokens(["why"])

    load_samples(cached, tokenizer_with(PLAIN))
    identities = {tokenizer_identity(tokenizer_with(PLAIN))}
    for number, change in enumerate((spaced, other_template, other_end, more), 2):
        tokenizer = tokenizer_with(PLAIN)
        change(tokenizer)
        assert list(load_samples(cached, tokenizer)) == load_samples(config(cached.path, held_out=3), tokenizer)
        identities.add(tokenizer_identity(tokenizer))
        assert len(identities) == number


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_that_changes_under_the_cache_finds_nothing_stale(
    write: Write, config: Config, bare: Tokenizer, tmp_path: Path, streaming: bool
) -> None:
    limit = 9 if streaming else None
    for text in ("one", "two too"):
        path = write({"text": text})
        kept = config(path, cache=str(tmp_path / "cache"), streaming=streaming, limit=limit)
        assert [bare.decode(sample.token[:-1]) for sample in load_samples(kept, bare)] == [text]


def test_the_evaluation_prompts_are_in_the_key(write: Write, config: Config, chat: Tokenizer, tmp_path: Path) -> None:
    path = write({"id": "a", "prompt": "one two three", "answer": "so"}, {"id": "b", "prompt": "why", "answer": "so"})
    kept = config(path, cache=str(tmp_path / "cache"), contamination=3)
    assert len(load_training(kept, chat, 0).samples) == 2
    asked = write({"prompt": "one two three"}, name="asked.jsonl")
    assert [sample.id for sample in load_training(kept, chat, 0, asked).samples] == ["b"]
    write({"prompt": "something else altogether"}, name="asked.jsonl")
    assert len(load_training(kept, chat, 0, asked).samples) == 2


@pytest.mark.parametrize(
    ("broken", "message"),
    [({"id": "bad", "prompt": "why"}, "sample bad: the loss mask is all zeros"), ({"id": "bad", "x": 1}, "record bad")],
)
def test_a_source_that_raises_in_the_middle_leaves_no_cache(
    write: Write, config: Config, chat: Tokenizer, tmp_path: Path, broken: dict[str, Any], message: str
) -> None:
    kept = config(write(*RECORDS, broken, *RECORDS), cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=message) as caught:
        load_samples(kept, chat)
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"])
    mended = config(write(*RECORDS), cache=kept.cache)
    assert len(load_samples(mended, chat)) == len(RECORDS)


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def halve(path: Path) -> None:
    """Cut a file in half."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [flip, halve, Path.unlink])
@pytest.mark.parametrize("name", [SAMPLES, PROMPTS, META])
def test_a_damaged_cache_is_named_and_made_anew(
    cached: DataConfig, chat: Tokenizer, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], name: str
) -> None:
    whole = list(load_samples(cached, chat))
    harm(place(cached) / name)
    with caplog.at_level(logging.WARNING):
        assert list(load_samples(cached, chat)) == whole
    assert str(place(cached)) in caplog.text
    assert "tokenising anew" in caplog.text
    caplog.clear()
    load_samples(cached, chat)
    assert caplog.text == ""


def test_a_cache_that_cannot_be_written_is_one_line(
    cached: DataConfig, config: Config, chat: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.cache=.*/file: cannot be written .*null for none"):
        load_samples(config(cached.path, cache=str(tmp_path / "file")), chat)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("data.cache.ArrowWriter.write", full)
    with pytest.raises(ValueError, match=r"data\.cache=.*No space left on device"):
        load_samples(cached, chat)
    assert [path for path in Path(str(cached.cache)).iterdir() if path.is_dir()] == []


def child(job: Callable[[], Any]) -> Any:
    """Start a process that does a job."""
    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    return process


def test_a_builder_that_dies_frees_the_lock_and_the_next_one_builds(
    cached: DataConfig, config: Config, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = multiprocessing.get_context("fork").Event()
    make = prompts.samples_of

    def hang(*given: Any) -> list[Sample]:
        inside.set()
        signal.pause()
        return make(*given)

    with monkeypatch.context() as patch:
        patch.setattr(prompts, "samples_of", hang)
        builder = child(lambda: load_samples(cached, chat))
    assert inside.wait(60)
    waiting = child(lambda: load_samples(cached, chat))
    left = [path for path in Path(str(cached.cache)).iterdir() if path.suffix == ".making"]
    assert len(left) == 1
    builder.kill()
    waiting.join(60)
    assert waiting.exitcode == 0
    assert not left[0].exists()
    refuse(monkeypatch)
    assert len(load_samples(cached, chat)) == 57


def test_of_many_processes_one_tokenises(
    cached: DataConfig, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = prompts.samples_of

    def noted(*given: Any) -> list[Sample]:
        with (tmp_path / "noted").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return make(*given)

    monkeypatch.setattr(prompts, "samples_of", noted)
    children = [child(lambda: load_samples(cached, chat)) for _ in range(4)]
    for process in children:
        process.join(60)
    assert [process.exitcode for process in children] == [0] * 4
    lines = (tmp_path / "noted").read_text().split()
    assert len(lines) == 57
    assert len(set(lines)) == 1


JOB = """
import json, sys
from pathlib import Path
root, folder, values = sys.argv[1:]
sys.path[0] = root
from accelerate import PartialState
from transformers import AutoTokenizer
from data import prompts
from data.batches import Batches, fingerprint, pack
from data.config import DataConfig

state, make = PartialState(cpu=True), prompts.samples_of

def noted(*given):
    with open(f"{folder}/noted", "a") as file:
        print(state.process_index, file=file)
    return make(*given)

prompts.samples_of = noted
config = DataConfig(**json.loads(values))
samples = prompts.load_training(config, AutoTokenizer.from_pretrained(folder), 2).samples
batches = Batches(pack(samples, config.length), 7, 2, 0, state.process_index, state.num_processes)
state.wait_for_everyone()
steps = [len(batches(step)) for step in range(batches.steps_per_epoch)]
Path(folder, f"rank{state.process_index}").write_text(json.dumps([fingerprint(samples), steps]))
"""


@pytest.mark.slow
def test_under_accelerate_launch_one_process_tokenises(cached: DataConfig, chat: Tokenizer, tmp_path: Path) -> None:
    chat.save_pretrained(tmp_path)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    launcher = LauncherConfig(2, 1, 0, None, None, None)
    words = launch.command(launcher, str(script), [str(ROOT), str(tmp_path), json.dumps(asdict(cached))])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Counter((tmp_path / "noted").read_text().split()).most_common() in ([("0", 57)], [("1", 57)])
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in (0, 1))
    assert first == second
