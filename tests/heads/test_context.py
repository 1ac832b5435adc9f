"""Rows are no longer than the target reads: shortened by default, refused where the user has said so."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import PreTrainedConfig

from heads.common.resolvers import ROOT, register_resolvers
from heads.common.target_config import UNBOUNDED, check_rows, context_of
from tests import toys


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_are_as_long_as_the_target_reads_at_most(name: str, tmp_path: Path) -> None:
    register_resolvers()
    toys.ARCHITECTURES[name].save_pretrained(tmp_path)
    for path, wanted, length in [(str(tmp_path), 512, 160), (str(tmp_path), 64, 64), ("me/not-here", 512, 512)]:
        values = OmegaConf.create({"path": path, "length": f"${{row_length:${{path}},{wanted}}}"})
        assert values.length == length
    context = context_of(toys.ARCHITECTURES[name])
    check_rows(160, context, name)
    with pytest.raises(ValueError, match=f"data.length is 161, but {name} reads at most 160 tokens: give 160 or less"):
        check_rows(161, context, name)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_rank_is_at_most_the_targets_width(name: str, tmp_path: Path) -> None:
    register_resolvers()
    toys.ARCHITECTURES[name].save_pretrained(tmp_path)
    for path, rank in ((str(tmp_path), toys.SIZES["hidden_size"]), ("me/not-here", 256)):
        head = OmegaConf.load(ROOT / "conf" / "head" / "block.yaml")
        assert OmegaConf.create({"model": {"path": path}, "head": head}).head.markov_rank == rank


def test_a_target_that_says_nothing_reads_any_length() -> None:
    assert context_of(PreTrainedConfig()) == UNBOUNDED
