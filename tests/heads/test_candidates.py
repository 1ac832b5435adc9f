"""Candidates: exact logits of the tokens that a head's lm_head scores, and the stage that trains their choice."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads import HEADS
from heads.formats.store import save_head
from heads.modules.vocab import choose_draft_vocab
from tests import toys
from tests.enumeration import EXACT, SAMPLINGS, TREES, VOCAB, Tables, distance, drafts, mild, one_pass
from tests.heads.exporting import exported, made
from tests.train import jobs
from tests.train.test_objective import CONFIG, batch, loss_of
from train.start import LoraAdapterConfig, check_init, init_head

KINDS = [kind for kind, options in toys.HEAD_CONFIGS.items() if "candidates" in options]
FACTORS = {"lm_head.candidate_up.weight", "lm_head.candidate_down.weight"}


def lm_head_of(kind: str, lm_head: str, size: int | None, count: int, rank: int) -> Any:
    """Return the lm_head of a head for a target whose logits have biases, a scale and a cap."""
    embeddings: Any = copy.deepcopy(toys.target("gemma2", torch.float64).embeddings)
    embeddings.factor, embeddings.lm_head = 0.5, torch.nn.Linear(32, toys.VOCAB).double().requires_grad_(False)
    options = {"lm_head": lm_head, "draft_vocab": size, "candidates": count, "candidate_rank": rank}
    head: Any = HEADS[kind](HEADS[kind].Config(name=kind, **toys.HEAD_CONFIGS[kind] | options), embeddings).double()
    choose_draft_vocab(head, toys.COUNTS)
    head.lm_head.factorise()
    return head.eval().requires_grad_(False).lm_head


@pytest.mark.parametrize("size", [None, 30])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_scores_the_candidates_exactly_and_nothing_else(kind: str, lm_head: str, size: int | None) -> None:
    hidden = torch.randn(3, 5, 32, dtype=torch.float64)
    every = lm_head_of(kind, lm_head, size, toys.VOCAB, 32)
    torch.testing.assert_close(every(hidden), every.train()(hidden))
    few = lm_head_of(kind, lm_head, size, 9, 6)
    found, low = few(hidden), hidden @ few.candidate_down.weight.T @ few.candidate_up.weight.T
    assert torch.equal(found.isfinite(), low >= low.sort(-1, descending=True).values[..., 8:9])
    torch.testing.assert_close(found, few.train()(hidden).where(found.isfinite(), float("-inf")))
    weight = few.rows().double() if lm_head == "shared" else few.weight  # of which the factors start as the best ones
    lost = (weight - few.candidate_up.weight @ few.candidate_down.weight).norm()
    torch.testing.assert_close(lost, torch.linalg.svdvals(weight)[6:].norm())


@pytest.mark.parametrize(("tree", "rule"), [("chain", "block"), ("sampled", "recursive"), ("sampled", "traversal")])
def test_the_emitted_law_is_the_targets(tree: str, rule: str) -> None:
    lm_head, tables = lm_head_of("mtp", "shared", VOCAB, 2, 1), Tables(0)
    tables.family = lambda g: (mild(g), lm_head(torch.randn(1, 32, generator=g, dtype=torch.float64))[0])
    found = one_pass(drafts(tables, TREES[tree], SAMPLINGS["T1"]), SAMPLINGS["T1"], rule).law
    assert distance(tables.continued(found, SAMPLINGS["T1"]), tables.target_law(SAMPLINGS["T1"])) < EXACT


@pytest.mark.parametrize("kind", ["eagle", "eagle4", "mtp", "peagle"])
def test_the_second_stage_trains_the_factors_only(kind: str, tmp_path: Path) -> None:
    target, first = toys.target("llama"), {"eagle": "hass", "eagle4": "eagle3.1"}.get(kind, kind)
    save_head(tmp_path / "first", toys.head(first, target), target.spec, {})
    stored = load_file(tmp_path / "first" / "model.safetensors")
    losses = jobs.configured(["experiment=candidates", "head=hass"]).objective.losses
    assert losses.keys() == {"soft_ce", "candidates", "missed"}, "and none of HASS's own"
    config: Any = HEADS[kind].Config(name=kind, **toys.HEAD_CONFIGS[kind] | {"candidates": 9, "draft_vocab": 7})
    head: Any = init_head(config, str(tmp_path / "first"), target)
    assert (head.config.name, head.config.candidates) == (kind, 9)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    assert all(torch.equal(before[name], value) for name, value in stored.items())
    (features, mask), found = batch(head.feature_layers), []
    trained = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.Adam(trained.values(), 1e-2)
    for _ in range(40):
        loss, sums = loss_of(head, head.unroll(features, 4), features, mask, replace(CONFIG, losses=losses, depths=4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(torch.stack([loss.detach(), sums["missed"].sum()]))
    assert (found[-1] <= found[0] * torch.tensor([0.5, 1.0])).all()
    changed = {name for name, value in head.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == trained.keys() == FACTORS
    save_head(tmp_path / "next", head, target.spec, {})
    again: Any = init_head(replace(config, candidate_rank=4), str(tmp_path / "next"), target)
    assert all(torch.equal(again.state_dict()[name], head.state_dict()[name]) for name in FACTORS), "they go on"
    assert init_head(replace(config, candidates=None), str(tmp_path / "next"), target).state_dict().keys() == {*stored}


def test_candidates_without_a_trained_head_or_their_loss_are_refused() -> None:
    run = jobs.configured(["head=eagle4", "head.candidates=9", "+objective.losses.candidates=1.0"])
    for peft, init in ((run.peft, None), (LoraAdapterConfig("lora", 4, 8, 0.0, False, None), "outputs/x")):
        with pytest.raises(ValueError, match=r"head\.candidates trains nothing but the candidates of an existing head"):
            check_init(peft, run.head, init, "replicate")
    for alone in ("head.candidates=9", "+objective.losses.candidates=1.0"):
        with pytest.raises(ValueError, match="belong together: give experiment=candidates"):
            jobs.configured(["head=eagle4", alone])


@pytest.mark.parametrize("kind", KINDS)
def test_engines_get_the_head_without_its_factors(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bias": False} if kind == "eagle" else {}
    folders = [exported(made(kind, candidates=n, **options), "vllm", tmp_path / f"{n}") for n in (9, None)]
    assert len({tuple(load_file(folder / "model.safetensors")) for folder in folders}) == 1
    if kind == "eagle4":  # all but EAGLE-4's plug-ins
        plug_in = exported(made(kind, candidates=9), kind, tmp_path / kind)
        theirs, ours = (load_file(folder / "model.safetensors") for folder in (plug_in, folders[0]))
        factors = {"efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"}
        assert theirs.keys() - ours.keys() == factors | {"embed_tokens.weight"}
        assert theirs["efficient_lm_head.weight"].shape == (toys.VOCAB, 6)
        said = json.loads((plug_in / "config.json").read_text())["efficient_lm_head_config"]
        assert said == {"type": "low_rank", "rank": 6, "num_candidates": 9}
        with pytest.raises(ValueError, match=r"no candidates, .*experiment=candidates"):
            exported(made(kind), kind, tmp_path / "refused")
        with pytest.raises(ValueError, match=r"draft_vocab=30, .*head\.draft_vocab=null"):
            exported(made(kind, candidates=9, draft_vocab=30), kind, tmp_path / "refused")
