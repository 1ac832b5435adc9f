"""The card: what was measured and recorded, in valid metadata, readable plots, and a command line for every engine."""

import json
import re
import shlex
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from hydra import compose, initialize_config_dir

from heads import HEADS
from heads.common.resolvers import ROOT, register_resolvers
from heads.formats.hub import kind_of
from heads.formats.published.export import FORMATS, READERS, refusals
from heads.formats.store import TargetSpec, read_config, save_head
from tests.eval.stubs import ROW
from tests.heads import exporting
from tests.train.publishing import DRAWN, ORIGIN, REPO, config, medusa
from train.publish import publish
from train.release import card as card_module
from train.release.card import SERVED, TITLES, Facts, bullets, card, code, escaped, metadata, title_of

HUB_TARGET = TargetSpec("Someone/Target-8B", 11, 4, 3, "f00d")


def card_of(run: Path, **changes: Any) -> str:
    return (publish(config(run, dry_run=True, **changes), HfApi(), str) / "README.md").read_text(encoding="utf-8")


def facts(
    kind: str, form: str | None, served: dict[str, Any], name: str = "Someone/Target-8B",
    refused: dict[str, str] | None = None, **more: Any,
) -> Facts:  # fmt: skip
    head: dict[str, Any] = {"name": kind, "length": None, **more}
    target = {"name": name, "num_layers": 24, "adapter": None, "vocab_size": 2048}
    settings = {"head": head, "target": target, "tree": {"kind": "chain", "depth": 2}}
    return Facts(
        config(Path("run"), repo="me/head", format=form), settings, served, tokenizer_sha256=None, report={},
        provenance={}, settings={}, refused={} if refused is None else refused, base_id=None, decodes=form is None,
    )  # fmt: skip


def served(known: Facts) -> str:
    return section(str(card(known)["README.md"]), "Serve it").strip()


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n")[1].split("\n## ", maxsplit=1)[0]


def test_the_metadata_are_the_hubs_own(run: Path) -> None:
    data = ModelCard(card_of(run)).data
    assert data.license == "mit"
    assert data.library_name == "headstart"
    assert data.pipeline_tag == "text-generation"
    assert data.datasets == ["Someone/chats"]
    assert data.tags == ["speculative-decoding", "draft-head", "medusa"]
    assert data.model_name == "tiny-medusa"
    assert data.base_model is None, "a folder of this machine is no model of the Hub"
    found = {(each.dataset_config, each.metric_type): each for each in data.eval_results if each.dataset_name == "tiny"}
    tau = found["T=0, batch 1, tree chain-2", "tau"]
    assert (tau.dataset_name, tau.task_type, tau.metric_value) == ("tiny", "text-generation", 2.345)
    assert tau.metric_args == {"interval_95": [2.2, 2.5]}
    assert found["T=0, batch 4, tree chain-2, 2 requests per second", "speedup"].metric_value == 1.678
    assert [each.metric_type for each in data.eval_results if each.dataset_name == "red"] == ["tau"]
    assert not any(each.metric_value in (9.87, 1.0) for each in data.eval_results)


def test_an_interval_of_no_width_is_not_published(run: Path) -> None:
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    for row in report["rows"]:
        row["tau_ci"] = [row["tau"], row["tau"]]
    (run / "report.json").write_text(json.dumps(report), encoding="utf-8")
    found = [each for each in ModelCard(card_of(run)).data.eval_results if each.metric_type == "tau"]
    assert found
    assert not any(each.metric_args for each in found)


def test_the_card_says_what_was_measured(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    report["settings"] = {"prompts": 5, "max_new_tokens": 64, "provenance": {"date": "2026-01-02T03:04:05"}}
    (run / "report.json").write_text(json.dumps(report))
    text = card_of(run)
    assert "torch and transformers: a CPU. 5 prompts a workload, 64 new tokens at most. Measured on 2026-01-02." in text
    assert "\n# A Medusa head for target\n" in text
    measured = section(text, "Measured")
    assert (
        "| medusa | chain-2 | tiny | 0 | 1 | 2.35 [2.20, 2.50] | 0.80 0.55 | 123.4 | 1.68 [1.50, 1.80] | 16/16 |"
        in text
    )
    assert "| medusa | chain-2 | tiny | 0 | 4 at 2 req/s | 2.35" in measured
    assert "| plain | root | tiny |" in measured
    assert "| withheld | 0/1, 1 FAILED |" in measured
    assert "9.87" not in text, "no clock measured that"
    assert "Not measured above temperature 0" in text
    assert "Not measured in batches" not in text


def test_where_the_head_comes_from(run: Path) -> None:
    origin = section(card_of(run), "Where it comes from")
    assert "- fingerprint: `f00d`" in origin
    assert "- `Someone/chats:en`, 90 of 100 records, revision `abc123`" in origin
    assert "- `own.jsonl`, 50 of 50 records, sha256 `beef`; who wrote its answers: by `engine`, dtype `bf16`" in origin
    assert "- dropped: 10 duplicates, 7 contaminated\n" in origin
    assert "- 8 records held out for measuring" in origin
    assert "- fingerprint of the samples: `feed`" in origin
    assert "- 140 samples of 1,000 tokens, 40% of them trained on" in origin
    assert "- 6 of 40 optimiser steps" in origin
    assert "- 3,072 tokens seen at most, 512 a step" in origin
    assert "- 1,200 positions trained on" in origin
    assert "those of step 4, the best by the verifier" in origin
    assert "- losses by weight: `{'soft_ce': 1.0}`, depths trained: `2`" in origin
    assert "`c0ffee`" in section(card_of(run), "Provenance")


def test_what_was_not_recorded_is_said_to_be_so(run: Path) -> None:
    save_head(run / "head", medusa(0), HUB_TARGET, {"kind": "chain", "depth": 2})
    for name in ("report.json", "report.md", "report.html", "provenance.json", "config.yaml", "metrics.jsonl"):
        (run / name).unlink()
    out = publish(config(run, dry_run=True), HfApi(), str)
    text = (out / "README.md").read_text()
    meta = ModelCard(text).data.to_dict()
    assert meta["base_model"] == "Someone/Target-8B"
    assert "model-index" not in meta
    assert "datasets" not in meta
    assert section(text, "Measured").strip() == "Not measured: the run has no report."
    assert "The run has not recorded on what it was trained." in text
    assert section(text, "Provenance").strip() == "Not recorded."
    assert f"run={REPO} model.path=Someone/Target-8B prompt" in text
    assert not (out / "plots").exists()
    assert not (out / "report.json").exists()


def test_a_targets_adapter_stands_in_the_card(run: Path) -> None:
    save_head(run / "head", medusa(0), TargetSpec("Someone/Target-8B", 11, 4, 3, "f00d", "me/adapter"), {})
    text = card_of(run)
    assert "model.path=Someone/Target-8B model.adapter=me/adapter" in text
    assert f'load("{REPO}", "model.path=Someone/Target-8B", "model.adapter=me/adapter")' in text


def test_a_slow_or_lossy_head_is_warned_of_and_its_card_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads((run / "report.json").read_text())
    rows = report["rows"]

    def published(*whole: dict[str, Any]) -> tuple[str, str]:
        (run / "report.json").write_text(json.dumps({**report, "rows": [*whole, *rows[-1:]]}))
        return section(card_of(run), "Measured"), capsys.readouterr().err

    slow = {**rows[0], "speedup": 0.88, "speedup_ci": [0.8, 0.9]}
    under_load = {**rows[2], "speedup": 1.2, "speedup_ci": [1.1, 1.3]}  # of latencies
    text, warned = published(slow, under_load)
    sentence = "slower than decoding without it in its own report: 0.88 times the same engine without drafts at best."
    assert f"**It is {sentence}**" in text
    assert warned == f"warning: {REPO}: It is {sentence}\n"
    text, warned = published(rows[1])
    assert "**It is not lossless in its own report" in text
    assert len(warned.splitlines()) == 1
    text, warned = published(rows[0], slow)  # at another batch size, say
    assert (warned, "**It is" in text) == ("", False)
    text, warned = published(rows[0], {**rows[1], "drafter": "medusa outputs/another"})
    assert (warned, "**It is" in text) == ("", False)
    assert "not lossless" in published(rows[0], {**rows[1], "drafter": f"medusa outputs/{run.name}"})[1]


def test_a_target_in_a_folder_is_called_as_its_config_does(run: Path) -> None:
    assert "`target`, whose config.json names no model of the Hub; so the card names none as its base." in card_of(run)
    target = Path(read_config(run / "head")["target"]["name"])
    (target / "config.json").write_text(json.dumps({"_name_or_path": "Someone/Target-8B"}))
    text = card_of(run)
    assert ModelCard(text).data.base_model == "Someone/Target-8B"
    assert "`target`, whose config.json names `Someone/Target-8B`." in text


def test_a_limit_beyond_the_targets_vocabulary_is_none() -> None:
    for limit, shown in ((32000, False), (512, True)):
        text = str(card(facts("mlp", None, {}, draft_vocab=limit))["README.md"])
        assert (f"draft\\_vocab: `{limit}`" in text) == shown


def test_plots_are_pictures_on_an_opaque_ground(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "_picture", DRAWN)
    out = publish(config(run, dry_run=True), HfApi(), str)
    text = (out / "README.md").read_text()
    for name in ("speedup", "acceptance", "training"):
        data = (out / "plots" / f"{name}.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert 600 < width < 2000
        assert height > 100
        assert re.search(rf"!\[[^\]]+\]\(plots/{name}\.png\)", text)


def test_names_from_outside_are_no_markup(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    evil = "<script>alert(1)</script>|[x](javascript:1)`\n# head"
    report["rows"][0] |= {"drafter": evil, "workload": "a|b*"}
    (run / "report.json").write_text(json.dumps(report))
    (run / "provenance.json").write_text(json.dumps({**ORIGIN, "note <b>": "``a``\n<script>"}))
    text = card_of(run)
    line = next(line for line in text.splitlines() if "alert" in line)
    assert line.startswith(
        "| \\<script\\>alert(1)\\</script\\>\\|\\[x\\](javascript:1)\\` \\# head | chain-2 | a\\|b\\* | 0"
    )
    assert "- note \\<b\\>: ``` ``a`` <script> ```" in text


def test_a_targets_name_is_no_markup_and_no_code(run: Path) -> None:
    evil = '/x/``` <b> "; import os; "'
    save_head(run / "head", medusa(0), TargetSpec(evil, 11, 4, 3, "f00d", "$(id) `x`"), {})
    text = card_of(run)
    base = Path(evil).name
    assert "# A Medusa head for \\`\\`\\` \\<b\\> " in text
    assert f"It drafts tokens for ```` {base} ````, which" in text
    lines = section(text, "Serve it")
    assert lines.count("````") == 6, "a fence that the name cannot close"
    assert f"AutoTokenizer.from_pretrained({json.dumps('path/to/' + base)})" in lines
    assert "model.adapter='$(id) `x`'" in lines


def test_headstarts_own_lines_say_all_that_the_repository_lacks(run: Path) -> None:
    text = section(card_of(run), "Serve it")
    lines = [shlex.split(line) for line in text.splitlines() if re.match(r"python \w+/run\.py ", line)]
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        measuring, writing = (compose(name, words[2:]) for name, words in zip(("eval", "generate"), lines, strict=True))
    base = read_config(run / "head")["target"]["name"]
    for said in (measuring, writing):
        assert (said.run, said.model.path) == (REPO, f"path/to/{Path(base).name}")
    assert measuring.workload == "my_log.jsonl"
    assert writing.prompt == "..."


def test_markup_is_escaped() -> None:
    assert escaped("a_b *c* <i> [d](e) `f` | g\nh") == r"a\_b \*c\* \<i\> \[d\](e) \`f\` \| g h"
    assert code("plain") == "`plain`"
    assert code("a `b` c") == "``a `b` c``"
    assert bullets({"a": {"b_c": 1, "none": None}, "d": []}) == "- a:\n  - b\\_c: `1`"


def test_every_kind_of_head_has_a_title_and_every_format_its_engines() -> None:
    assert set(TITLES) == set(HEADS)
    assert title_of("newcomer") == "A newcomer head", "a head costs no line here"
    writers = {writer for kinds in FORMATS.values() for writer in kinds.values()}
    assert set(SERVED) == writers


EAGLE3 = {"norm_before_residual": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 20]}}
PEAGLE = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]}}
DFLASH = {"architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": {"sample_from_anchor": False}}


def speculative(text: str) -> dict[str, Any]:
    """Return what the command line tells vLLM, as a shell hands it on."""
    words = shlex.split(next(line for line in text.splitlines() if "--speculative-config" in line))
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def test_an_eagle3_head_has_a_line_for_every_engine() -> None:
    text = served(facts("eagle3", "vllm", EAGLE3))
    assert speculative(text) == {"method": "eagle3", "model": "me/head", "num_speculative_tokens": 3}
    assert "vllm serve Someone/Target-8B --speculative-config" in text
    assert "\nvllm serve me/head\n" in text
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path me/head --speculative-num-steps 3" in text
    assert "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in text
    assert "trtllm-serve Someone/Target-8B --config draft.yaml" in text
    drafted = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["speculative_config"]
    assert drafted == {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "me/head"}


def test_other_layers_are_told_to_tensorrt() -> None:
    others = {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 11, 20]}}
    text = served(facts("eagle3", "trtllm", others))
    assert "eagle3_layers_to_capture: [2, 11, 20]" in text


def test_a_target_of_this_machine_is_no_hub_id() -> None:
    text = served(facts("eagle3", "vllm", EAGLE3, "/somewhere/mine"))
    assert "vllm serve path/to/mine --speculative-config" in text
    assert "\nvllm serve me/head\n" not in text


@pytest.mark.parametrize(
    ("kind", "form", "written", "method", "tokens", "said"),
    [
        ("eagle", "sglang", {}, "eagle", 3, "TensorRT-LLM 1.4.0rc, which reads EAGLE-3 alone"),
        ("hass", "vllm", {}, "eagle", 3, "--speculative-algorithm EAGLE "),
        ("medusa", "vllm", {"num_heads": 5}, "medusa", 5, "**vLLM 0.32.0 and earlier**"),
        ("medusa", "vllm", {"num_heads": 5}, "medusa", 5, "vLLM 0.33.0, which has removed Medusa; SGLang, which never"),
        ("peagle", "vllm", PEAGLE, "eagle3", 6, "SGLang 0.5.23 and TensorRT-LLM 1.4.0rc, which draft one token after"),
        ("block", "vllm", DFLASH, "dflash", 7, "--speculative-algorithm DFLASH"),
        ("block", "vllm", {**DFLASH, "architectures": ["Qwen3DSparkModel"]}, "dspark", 7, "algorithm DSPARK"),
        ("block", "vllm", {**DFLASH, "dflash_config": {"sample_from_anchor": True}}, "dflash", 8, "algorithm DFLASH"),
    ],
)
def test_a_line_for_each_engine_and_who_does_not_serve(
    kind: str, form: str, written: dict[str, Any], method: str, tokens: int, said: str
) -> None:
    text = served(facts(kind, form, written))
    assert speculative(text)["method"] == method
    assert speculative(text)["num_speculative_tokens"] == tokens
    assert said in text


def test_what_no_engine_reads_says_so() -> None:
    own = served(facts("medusa", None, {}))
    assert "do not read headstart's own layout: publish it with format= one of vllm, medusa" in own
    assert "no format of theirs holds this kind of head" in served(facts("mlp", None, {}))
    authors = served(facts("medusa", "medusa", {}))
    assert "FasterDecoding/Medusa reads this layout" in authors
    assert "publish it with format= one of vllm" in authors


def test_a_misleading_name_is_told_on_the_card(run: Path) -> None:
    assert (
        section(card_of(run, repo="me/eagle-run"), "Serve it").strip().startswith("Note: vLLM takes a path that holds")
    )


def test_an_exported_head_names_its_readers_and_limits(run: Path, tmp_path: Path) -> None:
    made = exporting.made("eagle3", draft_vocab=None, qk_norm=False, kv_injection=False, length=64)
    save_head(run / "head", made, exporting.target().spec, {"kind": "chain", "depth": 2})
    report = json.loads((run / "report.json").read_text())
    report["rows"] = [{**asdict(ROW), "drafter": "eagle3", "tree": "dynamic-d4k3n8"}]
    (run / "report.json").write_text(json.dumps(report))
    text = card_of(run)
    assert "look back at 64 tokens" in section(text, "Limits")
    assert "vLLM drafts and verifies one chain." in text
    assert "Not measured in batches" in text
    assert read_config(run / "head")["head"]["length"] == 64
    assert kind_of(run / "publish") == "eagle3"


PRUNED = {"markov_rank": 6, "from_anchor": True, "confidence": True, "draft_vocab": 30, "lm_head": "own"}


@pytest.mark.parametrize(
    ("kind", "form", "options", "readers", "said"),
    [
        ("eagle", "sglang", {"bias": True}, ["sglang"], "vLLM 0.32.0 and 0.33.0: the head has a bias of fc, bias=true"),
        ("mtp", "vllm", {"qk_norm": True}, ["vllm"], "SGLang 0.5.23: the head has qk_norm=true, which the format"),
        ("eagle3", "vllm", {"feature_layers": [2, 3, 5]}, ["vllm", "trtllm", "speculators"], "SGLang counts those of"),
        ("eagle3", "vllm", {"norm_before_residual": True}, ["vllm", "speculators"], "TensorRT-LLM 1.4.0rc: the head"),
        ("block", "sglang", {"domino": 8, "domino_rank": 4}, ["sglang"], "vLLM 0.32.0 and 0.33.0: the head has domino"),
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
    known = facts(kind, form, json.loads((folder / "config.json").read_text()), refused=refused)
    assert [tag for tag in metadata(known).tags if tag in READERS] == readers
    text = served(known).replace("\\", "")
    assert said in text
    assert ("vllm serve" in text, "sglang.launch_server" in text) == ("vllm" in readers, "sglang" in readers)
    assert ("trtllm-serve" in text) == ("trtllm" in readers)
