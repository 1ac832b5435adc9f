"""The card: what was measured and recorded, in valid metadata, and a command line for every engine."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard

from heads import HEADS
from heads.formats.published.export import FORMATS, READERS, refusals
from heads.formats.store import TargetSpec, save_head
from tests.heads import exporting
from tests.train.publishing import REPO, config, medusa
from train.publish import publish
from train.release.card import card, view

HUB_TARGET = TargetSpec("Someone/Target-8B", 11, 4, 3, "f00d")


def card_of(run: Path, **changes: Any) -> str:
    return (publish(config(run, dry_run=True, **changes), HfApi(), str) / "README.md").read_text(encoding="utf-8")


def of(
    kind: str, form: str | None, served: dict[str, Any], name: str = "Someone/Target-8B",
    refused: dict[str, str] | None = None, repo: str = "me/head",
) -> str:  # fmt: skip
    """Return the card of a head without records."""
    target = {"name": name, "num_layers": 24, "adapter": None, "vocab_size": 2048}
    content = {"head": {"name": kind, "length": 64}, "target": target, "tree": {"kind": "chain", "depth": 2}}
    published = config(Path("run"), repo=repo, format=form, gguf="x" if form == "gguf" else None)
    return card(view(published, content, served, refused or {}, {}, {}, {}))


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n")[1].split("\n## ", maxsplit=1)[0]


def change_report(run: Path, **changes: Any) -> None:
    report = json.loads((run / "report.json").read_text())
    (run / "report.json").write_text(json.dumps({**report, **changes}))


def test_the_metadata_are_the_hubs_own(run: Path) -> None:
    data = ModelCard(card_of(run)).data
    assert (data.license, data.library_name, data.pipeline_tag) == ("mit", "headstart", "text-generation")
    assert data.datasets == ["Someone/chats"]
    assert data.tags == ["speculative-decoding", "draft-head", "medusa"]
    assert data.base_model is None, "a folder of this machine is no model of the Hub"
    found = {
        (each.dataset_name, each.dataset_config, each.metric_type): each.metric_value for each in data.eval_results
    }
    assert found == {
        ("tiny", "T=0, batch 1, tree chain-2", "tau"): 2.345,
        ("tiny", "T=0, batch 1, tree chain-2", "speedup"): 1.678,
        ("red", "T=0, batch 1, tree chain-2", "tau"): 2.345,
        ("tiny", "T=0, batch 4, tree chain-2, 2 requests per second", "tau"): 2.345,
        ("tiny", "T=0, batch 4, tree chain-2, 2 requests per second", "speedup"): 1.678,
    }


def test_the_card_says_what_was_measured(run: Path) -> None:
    change_report(run, settings={"prompts": 5, "max_new_tokens": 64, "provenance": {"date": "2026-01-02T03:04:05"}})
    text = card_of(run)
    assert "\n# A Medusa head for `target`\n" in text
    results = section(text, "Results")
    cells = (
        "| `medusa` | `chain-2` | `tiny` | 0 | 1 | 2.35 [2.20, 2.50] | 0.80 0.55 | 123.4 | 1.68 [1.50, 1.80] | 16/16 |"
    )
    assert cells in results
    assert "| `medusa` | `chain-2` | `tiny` | 0 | 4 at 2 req/s | 2.35" in results
    assert "| `plain` | `root` | `tiny` |" in results
    assert "| withheld | 0/1, 1 FAILED |" in results
    assert "9.87" not in text, "no clock measured that"
    assert "Losslessness gate: FAILED, 32 of 33 outputs identical to the target's own, 0 the same but for" in results
    assert "Measured on `a CPU`: 5 prompts a workload, 64 new tokens at most, on 2026-01-02." in results
    assert "arxiv.org/abs/2401.10774" in section(text, "Citation")


def test_the_card_says_where_the_head_comes_from(run: Path) -> None:
    text = card_of(run)
    training = section(text, "Training")
    assert "- `Someone/chats:en`: 90 of 100 records, revision `abc123`\n" in training
    assert "- `own.jsonl`: 50 of 50 records, sha256 `beef`, answers `{'by': 'engine', 'target': {'dtype'" in training
    assert "- 140 samples of 1,000 tokens, 40% of them trained on; 8 records held out for measuring\n" in training
    assert (
        "- 6 optimiser steps of at most 512 tokens; the weights are those of step 4, the best by the verifier"
        in training
    )
    assert "- losses by weight: `{'soft_ce': 1.0}`" in training
    described = yaml.safe_load(training.split("```yaml\n")[1].split("```")[0])
    assert (described["head"]["name"], described["tree"]) == ("medusa", {"kind": "chain", "depth": 2})
    assert described["target"]["fingerprint"] == "f00d"
    recorded = yaml.safe_load(section(text, "Provenance").split("```yaml\n")[1].split("```")[0])
    assert recorded == {
        "git_revision": "c0ffee", "command": "train/run.py", "versions": {"torch": "9"}, "data_fingerprint": "feed",
    }  # fmt: skip
    assert section(text, "License").strip().startswith("The head: mit.")


def test_what_was_not_recorded_is_said_to_be_so(run: Path) -> None:
    save_head(run / "head", medusa(0), HUB_TARGET, {"kind": "chain", "depth": 2})
    for name in ("report.json", "report.md", "report.html", "provenance.json", "config.yaml", "metrics.jsonl"):
        (run / name).unlink()
    text = card_of(run)
    meta = ModelCard(text).data.to_dict()
    assert meta["base_model"] == "Someone/Target-8B"
    assert not meta.keys() & {"model-index", "datasets"}
    assert section(text, "Results").strip() == "Not measured: the run has no report."
    assert "The run has not recorded on what it was trained." in text
    assert section(text, "Provenance").strip() == "Not recorded."


def test_a_slow_or_lossy_head_is_warned_of_and_its_card_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads((run / "report.json").read_text())["rows"]

    def published(*whole: dict[str, Any]) -> tuple[str, str]:
        change_report(run, rows=[*whole, *rows[-1:]])
        return section(card_of(run), "Results"), capsys.readouterr().err

    slow = {**rows[0], "speedup": 0.88, "speedup_ci": [0.8, 0.9]}
    under_load = {**rows[2], "speedup": 1.2, "speedup_ci": [1.1, 1.3]}  # of latencies
    text, warned = published(slow, under_load)
    sentence = "slower than decoding without it in its own report: 0.88 times the same engine without drafts at best."
    assert f"**It is {sentence}**" in text
    assert warned == f"warning: {REPO}: It is {sentence}\n"
    assert "**It is not lossless in its own report" in published(rows[1])[0]
    text, warned = published(rows[0], slow, {**rows[1], "drafter": "medusa outputs/another"})
    assert (warned, "**It is" in text) == ("", False)
    assert "not lossless" in published(rows[0], {**rows[1], "drafter": f"medusa outputs/{run.name}"})[1]


def test_names_from_outside_are_no_markup_and_no_code(run: Path) -> None:
    evil = '/x/``` <b> "; import os; "'
    save_head(run / "head", medusa(0), TargetSpec(evil, 11, 4, 3, "f00d", "$(id) `x`"), {})
    rows = json.loads((run / "report.json").read_text())["rows"]
    change_report(run, rows=[{**rows[0], "drafter": "<script>|[x](javascript:1)`\n# head"}])
    text, base = card_of(run), Path(evil).name
    assert f"# A Medusa head for ```` {base} ````\n" in text
    assert "\n| `` <script>\\|[x](javascript:1)` # head `` | `chain-2` |" in text
    lines = section(text, "Serve it")
    assert lines.count("````") == 6, "a fence that the name cannot close"
    assert f"AutoTokenizer.from_pretrained({json.dumps('path/to/' + base)})" in lines
    assert "'model.adapter=$(id) `x`'" in lines
    assert f'load("{REPO}", {json.dumps(f"model.path=path/to/{base}")}, "model.adapter=$(id) `x`")' in lines


EAGLE3 = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 11, 20]}}
PEAGLE = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]}}
DFLASH = {"architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": {"sample_from_anchor": False}}
DSPARK = {**DFLASH, "architectures": ["Qwen3DSparkModel"], "markov_rank": 4}
WRITTEN = {"eagle3": EAGLE3, "eagle4": EAGLE3, "peagle": PEAGLE, "block": DFLASH, "medusa": {"num_heads": 5}}


def test_every_kind_of_head_and_every_format_has_its_card() -> None:
    for kind in HEADS:
        text = of(kind, None, {})
        assert f"\n# A draft head of kind {kind}" not in text
        assert ("arxiv.org" in text) == (kind != "eagle4")  # which has no paper
    for form, kinds in FORMATS.items():
        for kind in kinds:
            text = section(of(kind, form, WRITTEN.get(kind, {})), "Serve it")
            assert re.search(r"vllm serve|The authors' own code|import openvino_genai", text), (form, kind)
            assert ("llama-server" in text) == (form == "gguf")
            assert "tree=chain" in text
            assert "\n\n\n\n" not in text
    own = of("medusa", None, {})
    assert "do not read headstart's own layout: publish it with format= one of vllm, medusa" in own
    assert "no format of theirs holds this kind of head" in of("mlp", None, {})
    authors = of("medusa", "medusa", {})
    assert "FasterDecoding/Medusa, reads this layout" in authors
    assert "publish it with format= one of vllm" in authors
    assert "look back at 64 tokens" in section(authors, "Limits")


def speculative(text: str) -> dict[str, Any]:
    """Return what the command line tells vLLM, as a shell hands it on."""
    words = shlex.split(next(line for line in text.splitlines() if "--speculative-config" in line))
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


@pytest.mark.parametrize(
    ("kind", "form", "written", "expected", "said"),
    [
        ("eagle3", "vllm", EAGLE3, {"method": "eagle3", "num_speculative_tokens": 3}, "-algorithm EAGLE3 "),
        ("hass", "vllm", {}, {"method": "eagle", "num_speculative_tokens": 3}, "--speculative-algorithm EAGLE "),
        ("medusa", "vllm", {"num_heads": 5}, {"method": "medusa", "num_speculative_tokens": 5}, "0.32.0 and earlier**"),
        (
            "peagle", "vllm", PEAGLE, {"method": "eagle3", "num_speculative_tokens": 6, "parallel_drafting": True},
            "which draft one token after another",
        ),
        ("block", "gguf", DFLASH, {"method": "dflash", "num_speculative_tokens": 7}, "dflash --spec-draft-n-max 7"),
        ("block", "gguf", DSPARK, {"method": "dspark", "num_speculative_tokens": 7}, "dspark --spec-draft-n-max 7"),
        (
            "block", "vllm", {**DFLASH, "dflash_config": {"sample_from_anchor": True}},
            {"method": "dflash", "num_speculative_tokens": 8}, "--speculative-algorithm DFLASH",
        ),
        (
            "mtp", "vllm", {"qk_norm": True}, {"method": "mtp", "num_speculative_tokens": 3},
            """--hf-overrides '{"num_nextn_predict_layers": 1, "qk_norm": true}'""",
        ),
    ],
)  # fmt: skip
def test_a_line_for_each_engine_and_who_does_not_serve(
    kind: str, form: str, written: dict[str, Any], expected: dict[str, Any], said: str
) -> None:
    text = section(of(kind, form, written), "Serve it")
    assert speculative(text) == {"model": "me/head", **expected}
    assert "vllm serve Someone/Target-8B " in text
    assert said in text


PRUNED = {"markov_rank": 6, "from_anchor": True, "confidence": True, "draft_vocab": 30, "lm_head": "own"}


@pytest.mark.parametrize(
    ("kind", "form", "options", "readers", "said"),
    [
        ("eagle", "sglang", {"bias": True}, ["sglang"], "vLLM 0.32.0 and 0.33.0: the head has a bias of fc, bias=true"),
        ("mtp", "vllm", {"qk_norm": True}, ["vllm"], "SGLang 0.5.23: the head has qk_norm=true, which the format"),
        ("eagle3", "vllm", {"feature_layers": [2, 3, 5]}, ["vllm", "trtllm", "speculators"], "SGLang counts those of"),
        ("eagle3", "vllm", {"norm_before_residual": True}, ["vllm", "speculators"], "TensorRT-LLM 1.4.0rc: the head"),
        ("block", "vllm", PRUNED, ["vllm"], "SGLang 0.5.23: the head has draft_vocab=30"),
    ],
)
def test_an_engine_that_the_export_refuses_is_not_said_to_serve(
    kind: str, form: str, options: dict[str, Any], readers: list[str], said: str, tmp_path: Path
) -> None:
    head = exporting.made(kind, **options, **({"mask_token": 7} if kind == "block" else {}))
    if kind == "block":
        head.mask.data.copy_(exporting.target().embeddings.embed(torch.tensor(7)))
    target = exporting.SAID | ({"architectures": ["DeepseekV3ForCausalLM"]} if "feature_layers" in options else {})
    folder = exporting.exported(head, form, tmp_path, config=target)
    refused = refusals(head, exporting.served(config=target))
    text = of(kind, form, json.loads((folder / "config.json").read_text()), refused=refused)
    assert [tag for tag in ModelCard(text).data.tags if tag in READERS] == readers
    assert said in text
    assert ("vllm serve" in text, "sglang.launch_server" in text) == ("vllm" in readers, "sglang" in readers)
    assert ("trtllm-serve" in text) == ("trtllm" in readers)
