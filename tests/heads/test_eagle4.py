"""EAGLE-4's candidate head: exact logits of the tokens that it chooses, and its own stage of training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.eagle4 import CandidateLmHead
from heads.formats.store import save_head
from tests import toys
from tests.heads.exporting import exported, made
from tests.train import jobs
from tests.train.test_objective import CONFIG, batch, loss_of
from train.start import check_init, init_head

LAYERS = "head.feature_layers=[0,1,2]"


def candidate_head() -> Any:
    head: Any = toys.head("eagle4 with candidates", toys.target("llama", torch.float64))
    return head.lm_head


def test_a_draft_scores_the_candidates_exactly_and_nothing_else() -> None:
    lm_head = candidate_head()
    hidden = torch.randn(3, 5, lm_head.weight.shape[1], dtype=torch.float64)
    found, whole = lm_head(hidden), hidden @ lm_head.weight.T
    low = hidden @ lm_head.candidate_down.weight.T @ lm_head.candidate_up.weight.T
    chosen = low >= low.sort(-1, descending=True).values[..., 8:9]
    assert torch.equal(found.isfinite(), chosen)
    torch.testing.assert_close(found[chosen], whole[chosen])
    torch.testing.assert_close(lm_head.train()(hidden), whole)


def test_the_factors_start_as_the_best_ones_of_their_rank() -> None:
    lm_head: CandidateLmHead = candidate_head()
    lm_head.factorise()
    both = lm_head.candidate_up.weight @ lm_head.candidate_down.weight
    lost = torch.linalg.svdvals(lm_head.weight)[lm_head.candidate_down.out_features :].norm()
    torch.testing.assert_close((lm_head.weight - both).norm(), lost)


def test_the_second_stage_starts_from_an_eagle3_head_and_trains_the_factors_only(tmp_path: Path) -> None:
    target = toys.target("llama")
    save_head(tmp_path / "first", toys.head("eagle3.1", target), target.spec, {"kind": "chain", "depth": 2})
    run = jobs.configured(["experiment=eagle4_candidates", LAYERS, f"init={tmp_path / 'first'}", "head.candidates=9"])
    head: Any = init_head(replace(run.head, candidate_rank=6), run.init, target)
    assert (head.config.name, head.config.candidates, head.config.draft_vocab) == ("eagle4", 9, 30)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    stored = load_file(tmp_path / "first" / "model.safetensors")
    assert all(torch.equal(before[name], value) for name, value in stored.items())
    features, mask = batch(head.feature_layers)
    of = replace(CONFIG, losses=run.objective.losses, depths=3)
    optimizer, losses = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], 1e-2), []
    for _ in range(40):
        loss, sums = loss_of(head, head.unroll(features, 3), features, mask, of)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((float(loss.detach()), float(sums["missed"].sum())))
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert losses[-1][1] <= losses[0][1]
    changed = {name for name, value in head.state_dict().items() if not torch.equal(value, before[name])}
    factors = {"lm_head.candidate_up.weight", "lm_head.candidate_down.weight"}
    assert changed == factors
    save_head(tmp_path / "second", head, target.spec, {"kind": "chain", "depth": 2})
    again: Any = init_head(run.head, str(tmp_path / "second"), target)
    assert all(torch.equal(again.state_dict()[name], head.state_dict()[name]) for name in factors), "they go on"
    first: Any = init_head(replace(run.head, candidates=None), str(tmp_path / "second"), target)
    assert first.state_dict().keys() == before.keys() - factors


def test_candidates_without_a_trained_head_or_their_loss_are_refused() -> None:
    run = jobs.configured(["head=eagle4", LAYERS, "head.candidates=9", "+objective.losses.candidates=1.0"])
    with pytest.raises(ValueError, match=r"head\.candidates trains a candidate head on top of an existing head"):
        check_init(run.peft, run.head, None, "replicate")
    for alone in ("head.candidates=9", "+objective.losses.candidates=1.0"):
        with pytest.raises(ValueError, match="train a candidate head together: give experiment=eagle4_candidates"):
            jobs.configured(["head=eagle4", LAYERS, alone])
    with pytest.raises(ValueError, match=r"give head\.lm_head=own"):
        jobs.configured(["experiment=eagle4_candidates", LAYERS, "head.lm_head=shared"])


def test_engines_without_a_candidate_head_get_an_eagle3_head(tmp_path: Path) -> None:
    head = made("eagle4", candidates=9)
    plug_in, vllm = (exported(head, form, tmp_path / form) for form in ("eagle4", "vllm"))
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (plug_in, vllm))
    assert theirs.keys() - ours.keys() == {
        "efficient_lm_head.weight", "efficient_lm_head_down_proj.weight", "embed_tokens.weight"
    }  # fmt: skip
    assert theirs["efficient_lm_head.weight"].shape == (toys.VOCAB, 6)
    config = json.loads((plug_in / "config.json").read_text())
    assert config["efficient_lm_head_config"] == {"type": "low_rank", "rank": 6, "num_candidates": 9}
    with pytest.raises(ValueError, match=r"no candidate head, .*experiment=eagle4_candidates"):
        exported(made("eagle4"), "eagle4", tmp_path / "refused")
    with pytest.raises(ValueError, match=r"draft_vocab=30, .*head\.draft_vocab=null"):
        exported(made("eagle4", candidates=9, draft_vocab=30), "eagle4", tmp_path / "refused")
