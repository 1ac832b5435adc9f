"""The Arrow cache: made once, mapped by all, never stale, never half there."""

import errno
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast as Tokenizer

from data.config import DataConfig
from data.text import cache, prompts
from data.text.cache import META, PROMPTS, SAMPLES, CachedSamples, cache_key, tokenizer_identity
from data.text.files import content_hash
from data.text.masks import Sample
from data.text.prompts import load_samples, load_training
from heads.common.resolvers import register_resolvers
from heads.common.untrusted import parse_json
from inference.chat_template import RenderError
from inference.target.tokenizer import text_ids
from tests.data.chatml import PLAIN, RECORDS, TAGGED, Tokens

Config = Callable[..., DataConfig]
Write = Callable[..., str]


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
    assert samples[24:-9:3] == plain[24:-9:3]
    with pytest.raises(IndexError):
        samples[57]
    assert isinstance(samples, CachedSamples)
    arrays = [(token.tolist(), mask.tolist()) for token, mask in samples.arrays()]
    assert arrays == [(sample.token, sample.loss_mask) for sample in plain]


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


@pytest.mark.parametrize("code", [DataConfig, load_samples, parse_json, RenderError, text_ids])
def test_the_code_that_shapes_samples_is_in_the_key(
    config: Config, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch, code: Any
) -> None:
    before, shaping = cache_key(config("f"), chat, []), Path(str(inspect.getsourcefile(code)))
    monkeypatch.setattr(cache, "content_hash", lambda file: "other" if file == shaping else content_hash(file))
    assert cache_key(config("f"), chat, []) != before


@pytest.mark.parametrize("library", ["transformers", "tokenizers"])
def test_the_libraries_that_tokenise_are_in_the_key(
    config: Config, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    before = cache_key(config("f"), chat, [])
    monkeypatch.setattr(getattr(cache, library), "__version__", "0")
    assert cache_key(config("f"), chat, []) != before


def test_what_shapes_no_sample_is_not_in_the_key(config: Config, chat: Tokenizer) -> None:
    assert cache_key(config("f"), chat, ["a"]) == cache_key(config("f", length=7, cache="c"), chat, ["a"])
    assert cache_key(config("f"), chat, ["a"]) != cache_key(config("f"), chat, ["b"])
    assert cache_key(config("f"), chat, ["a", "b"]) != cache_key(config("f"), chat, ["b", "a"])


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
    assert "tokenising again" in caplog.text
    caplog.clear()
    load_samples(cached, chat)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HEADSTART_CACHE": "/a"}, "/a/data"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/headstart/data"),
        ({}, "/home/me/.cache/headstart/data"),
    ],
)
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str) -> None:
    for name in ("HEADSTART_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    register_resolvers()
    assert OmegaConf.create({"cache": "${cache_folder:data}"}).cache == folder


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
