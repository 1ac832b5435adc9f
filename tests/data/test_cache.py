"""The Arrow cache: made once, mapped by all, never stale, never half there."""

import errno
import inspect
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast as Tokenizer

from data.config import DataConfig
from data.text import prompts
from data.text.files import content_hash
from data.text.masks import Sample
from data.text.prompts import META, PROMPTS, SAMPLES, CachedSamples, cache_key, load_training, tokenizer_identity
from heads.common.untrusted import parse_json
from inference.target.tokenizer import text_ids
from tests.data.chatml import PLAIN, TAGGED, Tokens, load_samples

Config = Callable[..., DataConfig]
Write = Callable[..., str]


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokenising fail from now on."""

    def tokenise(*_: Any) -> list[Sample]:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(prompts, "samples_of", tokenise)


def test_cached_data_are_the_data_and_tokenised_once(
    cached: DataConfig, config: Config, chat: Tokenizer, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_training(config(cached.path, held_out=3), chat, 2)
    for _ in range(2):
        data = load_training(cached, chat, 2)
        assert isinstance(data.samples, CachedSamples)
        assert list(data.samples) == plain.samples
        assert (data.held_out, data.counts) == (plain.held_out, plain.counts)
    assert (len(plain.held_out), len(load_training(cached, chat, 9).held_out)) == (2, 3)
    samples = data.samples
    assert isinstance(samples, CachedSamples)
    assert (len(samples), samples[0], samples[-1]) == (57, plain.samples[0], plain.samples[-1])
    with pytest.raises(IndexError):
        samples[57]
    arrays = [(token.tolist(), mask.tolist()) for token, mask in samples.arrays()]
    assert arrays == [(sample.token, sample.loss_mask) for sample in plain.samples]
    asked = config(cached.path, cache=cached.cache, prompts=write({"id": "p", "prompt": "x"}, name="asked.jsonl"))
    assert [[p.id for p in load_training(asked, chat, 5).held_out] for _ in range(2)] == [["p"], ["p"]]
    refuse(monkeypatch)
    assert list(load_samples(cached, chat)) == plain.samples


def test_all_that_shapes_samples_is_in_the_key(
    config: Config, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = [
        {"limit": 5}, {"max_tokens": 9}, {"min_tokens": 2}, {"dedup": False}, {"contamination": 4}, {"held_out": 1},
        {"split": "test"}, {"seed": 1}, {"prompts": "p.jsonl"}, {"streaming": True, "limit": 5},
    ]  # fmt: skip
    keys = [cache_key(config("f", **changed), chat, of) for changed in ({}, *options) for of in (["a"], ["b"])]
    keys += [cache_key(config("f"), chat, of) for of in (["a", "b"], ["b", "a"])]
    for library in ("transformers", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(prompts, library), "__version__", "0")
            keys.append(cache_key(config("f"), chat, ["a"]))
    for code in (DataConfig, load_training, parse_json, text_ids):
        shaping = Path(str(inspect.getsourcefile(code)))
        with monkeypatch.context() as patch:
            patch.setattr(prompts, "content_hash", lambda file, own=shaping: "" if file == own else content_hash(file))
            keys.append(cache_key(config("f"), chat, ["a"]))
    assert len(set(keys)) == len(keys)
    assert keys[0] == cache_key(config("f", length=7, cache="c"), chat, ["a"]), "these shape no sample"


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
    for text in ("one", "two"):
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


def test_a_cache_that_cannot_be_written_is_one_line(
    cached: DataConfig, config: Config, chat: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.cache=.*/file: cannot be written .*null for none"):
        load_samples(config(cached.path, cache=str(tmp_path / "file")), chat)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.write", full)
    with pytest.raises(ValueError, match=r"data\.cache=.*No space left on device"):
        load_samples(cached, chat)
    assert [path for path in Path(str(cached.cache)).iterdir() if path.is_dir()] == []


def child(job: Callable[[], Any]) -> Any:
    """Start a process that does a job."""
    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    return process


def test_a_builder_that_dies_frees_the_lock_and_the_next_one_builds(
    cached: DataConfig, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch
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
    left = [path for path in Path(str(cached.cache)).iterdir() if path.suffix == ".new"]
    assert len(left) == 1
    builder.kill()
    waiting.join(60)
    assert waiting.exitcode == 0
    assert not left[0].exists()
    monkeypatch.delattr(prompts, "samples_of")  # nothing is tokenised again
    assert len(load_samples(cached, chat)) == 57


@pytest.mark.parametrize("name", [SAMPLES, PROMPTS, META])
def test_a_cut_cache_is_made_anew(name: str, cached: DataConfig, chat: Tokenizer) -> None:
    whole = list(load_samples(cached, chat))
    (file,) = Path(str(cached.cache)).glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[:-9])
    assert list(load_samples(cached, chat)) == whole
