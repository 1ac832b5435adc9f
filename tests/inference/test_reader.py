"""A tokenizer without its model ends answers where the model does."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from inference.target.target import Target
from inference.target.tokenizer import Reader, Reads
from tests import toys


@pytest.mark.parametrize("generation", [True, False])
def test_the_same_tokens_end_an_answer_with_and_without_the_model(tmp_path: Path, generation: bool) -> None:
    LlamaForCausalLM(LlamaConfig(**toys.SIZES | {"eos_token_id": [7, 9]})).save_pretrained(tmp_path)
    toys.tokenizer().save_pretrained(tmp_path)
    if not generation:
        (tmp_path / "generation_config.json").unlink()
    read = Reader.load(str(tmp_path), False)
    assert isinstance(read, Reads)
    assert read.eos == Target.load(str(tmp_path), "float32", "cpu").eos == {7, 9}


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    toys.tokenizer().save_pretrained(tmp_path)
    assert Reader.load(str(tmp_path), False).eos == frozenset()
    with pytest.raises(ValueError, match="no tokenizer loads from there") as caught:
        Reader.load(str(tmp_path / "nowhere"), False)
    assert "\n" not in str(caught.value)
