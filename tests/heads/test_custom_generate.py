"""Published heads that no engine loads decode in transformers: the same tokens, by the drafts of the head here."""

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from heads.base import Features
from heads.formats import custom_generate
from heads.formats.custom_generate.generate import Head, choose
from heads.formats.store import save_head
from tests import drafting, toys
from tests.tokenizers import trained

PAIRS = [
    name for name, (kind, options) in toys.PAIRS.items() if kind in custom_generate.KINDS and not options.get("prefix")
]
KINDS = ["medusa", *PAIRS]
NEW = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")


def published(folder: Path, head: nn.Module, depth: int = 3) -> Path:
    save_head(folder, head, toys.target().spec, {"kind": "chain", "depth": depth})
    for name, text in custom_generate.files(json.loads((folder / "config.json").read_text())["head"]).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return published(tmp_path / "head", toys.head("mlp", toys.target()))


def prompt(seed: int = 1) -> Tensor:
    return torch.tensor([toys.prompt(seed)])


def generate(folder: Path, ids: Tensor, model: Any = None, **options: Any) -> Any:
    model = model or toys.target().model
    return model.generate(ids, custom_generate=str(folder), trust_remote_code=True, **GREEDY | options)


@pytest.mark.parametrize("name", KINDS)
def test_the_drafts_are_those_of_the_head_here(name: str, tmp_path: Path) -> None:
    target = toys.target()
    head: Any = toys.head(name, target)
    read = Head(str(published(tmp_path / "head", head)), target.model, {})
    ids = torch.tensor([toys.prompt(7, 12)])
    features = target.features(ids, torch.zeros_like(ids), ())
    state, level = drafting.extend(head, None, Features(*(each[:, :-1] for each in features[:4])), ids[0, 1:])
    found = read.draft(features.last_hidden[0, -2:-1], ids, head.max_depth, lambda _, logits: logits, False)
    assert len(found) == head.max_depth
    for depth, (token, q) in enumerate(found, 1):
        ours = drafting.logits(head, level)[0].softmax(-1)
        torch.testing.assert_close(q, ours, rtol=0, atol=1e-5)
        assert token == ours.argmax()
        if depth < head.max_depth:
            level = drafting.expand(
                head, state, level, token, torch.tensor([0]), torch.ones(1, depth, dtype=torch.bool)
            )


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_tokens_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    target = toys.target(name)
    model: Any = target.model
    head = toys.head("medusa", target)
    save_head(tmp_path / "head", head, target.spec, {"kind": "chain", "depth": 3})
    code = tmp_path / "head" / custom_generate.FOLDER
    code.mkdir()
    (code / "generate.py").write_text(custom_generate.files({"name": "medusa"})["custom_generate/generate.py"])
    plain = model.generate(prompt(), **GREEDY)
    found = generate(tmp_path / "head", prompt(), model, return_dict_in_generate=True)
    assert toys.lively(plain[0].tolist())
    assert torch.equal(found.sequences, plain)
    assert 0 < found.passes < NEW
    assert torch.equal(generate(tmp_path / "head", prompt(), model, draft_tokens=1), plain)


def test_accepted_drafts_save_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each draft of the model's own text two tokens are right: the text is the same, in a third of the passes."""
    model: Any = toys.target().model
    plain = model.generate(prompt(), **GREEDY)

    def draft(_: Any, last: Tensor, ids: Tensor, count: int, *__: Any) -> list[tuple[Tensor, Tensor]]:
        at = ids.shape[1]
        counts.append(count)
        known = plain[0, at : at + max(count, 0)].clone()
        known[2:] = 0
        return [(token[None], torch.zeros(model.config.vocab_size)) for token in known]

    counts = list[int]()
    module = sys.modules[type(generate(folder, prompt(), return_dict_in_generate=True)).__module__]
    monkeypatch.setattr(module.Head, "draft", draft)
    found = generate(folder, prompt(), return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain)
    assert found.passes <= NEW // 3 + 1
    assert (counts[0], counts[-1]) == (3, 1), "the saved tree's depth, and what is left beside the model's own token"
    generate(folder, prompt(), draft_tokens=99)
    assert max(counts) == toys.HEAD_CONFIGS["mlp"]["heads"] > 3


def test_stops_streams_and_processors_are_generates(folder: Path) -> None:
    model: Any = toys.target().model
    plain = model.generate(prompt(), **GREEDY)
    end = int(plain[0, 12])
    assert torch.equal(
        generate(folder, prompt(), eos_token_id=end), model.generate(prompt(), **GREEDY, eos_token_id=end)
    )
    asked = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    assert torch.equal(generate(folder, prompt(), **asked), model.generate(prompt(), **GREEDY, **asked))
    tokenizer = trained("bytes")
    word = tokenizer.decode(plain[0, 14:15])
    for at in (12, 99):
        criteria = StoppingCriteriaList([lambda ids, *_, at=at: torch.tensor([ids.shape[1] >= at])])
        stops: dict[str, Any] = {"stop_strings": [word], "tokenizer": tokenizer, "stopping_criteria": criteria}
        stopped = generate(folder, prompt(), **stops)
        assert torch.equal(stopped, model.generate(prompt(), **GREEDY, **stops))
        assert stopped.shape[1] < plain.shape[1], "by the string or, before it, by the criterion"

    class Streamed(BaseStreamer):
        def __init__(self) -> None:
            self.parts, self.ended = list[int](), 0

        def put(self, value: Tensor) -> None:
            self.parts += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    streamer = Streamed()
    generate(folder, prompt(), streamer=streamer)
    assert (streamer.parts[-NEW:], streamer.ended) == (plain[0, -NEW:].tolist(), 1)


def test_a_draft_is_accepted_by_the_law_of_the_model() -> None:
    torch.manual_seed(1)
    scores, q, draws = torch.randn(5), torch.randn(5).softmax(-1), 4000
    drafts = torch.multinomial(q, draws, replacement=True)
    kept = Counter(int(choose(scores, (draft[None], q), True)[0]) for draft in drafts)
    expected = (scores.double().softmax(-1) * draws).tolist()
    assert chisquare([kept[i] for i in range(5)], expected).pvalue > 1e-3
    assert chisquare(drafts.bincount(minlength=5).tolist(), expected).pvalue < 1e-6


def test_a_seed_gives_the_same_draws(folder: Path) -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(generate(folder, prompt(), do_sample=True, temperature=0.8, top_k=10).tolist())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"num_beams": 2}, "beam_search: not with custom_generate"),
        ({"ids": prompt().repeat(2, 1)}, "custom_generate decodes one sequence without padding"),
        ({"attention_mask": (prompt() != prompt()[0, 0]).long()}, "one sequence without padding"),
        ({"model": AutoModelForCausalLM.from_config(LlamaConfig(**toys.SIZES | {"num_hidden_layers": 2}))},
         "its num_layers is 3, this model's 2"),
        ({"output_logits": True}, "output_logits: not with custom_generate"),
        ({"labels": prompt()}, "labels: not with custom_generate"),
        ({"model": AutoModelForCausalLM.from_config(LlamaConfig(**toys.SIZES | {"hidden_size": 64}))},
         "made for another model, llama: its hidden_size is 32, this model's 64"),
    ],
)  # fmt: skip
def test_what_it_does_not_decode_is_refused(folder: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        generate(folder, **{"ids": prompt()} | options)


def test_heads_that_engines_load_carry_no_code() -> None:
    assert [name for name in toys.HEAD_CONFIGS if custom_generate.files({"name": name})] == ["medusa", "hydra", "mlp"]
    assert custom_generate.files({"name": "hydra", "prefix": True}) == {}


def test_it_runs_where_headstart_is_not() -> None:
    """What it imports comes with transformers; its other dependency is the model that it is given."""
    tree = ast.parse(custom_generate.files({"name": "medusa"})["custom_generate/generate.py"])
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    others = {name.split(".")[0] for name in named} - sys.stdlib_module_names
    assert others == {"torch", "safetensors", "transformers"}
