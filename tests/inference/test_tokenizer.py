"""The tokens of a text, those that end an answer, and tokenizers that fail."""

import copy
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from inference.target.loading import load_tokenizer
from inference.target.target import Target
from inference.target.tokenizer import text_ids, tokenize
from tests import toys
from tests.tokenizers import trained


@pytest.mark.parametrize("generation", [True, False])
def test_what_ends_an_answer_is_the_configurations_and_the_tokenizers(tmp_path: Path, generation: bool) -> None:
    LlamaForCausalLM(LlamaConfig(**toys.SIZES | {"eos_token_id": [7, 9]})).save_pretrained(tmp_path)
    tokenizer = toys.tokenizer()
    tokenizer.eos_token = "w5"
    tokenizer.save_pretrained(tmp_path)
    if not generation:
        (tmp_path / "generation_config.json").unlink()
    assert Target.load(str(tmp_path), "float32", "cpu").eos == {5, 7, 9}


def test_a_tokenizer_that_fails_at_a_text_is_named(tmp_path: Path) -> None:
    """Without an unknown token, a word that is not in its list is an error of the library, when it comes."""
    made = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))  # which is not in it
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path), False)
    assert tokenize(found, "a b")["input_ids"] == [0, 1]
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}: its tokenizer fails at a text") as caught:
        text_ids("a c", found)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnicodeEncodeError):
        tokenize(found, ["a", "\ud800"])
    made = Tokenizer(WordLevel({"c": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer loads from there"):
        load_tokenizer(str(tmp_path), False)


def test_a_prompt_has_no_end_token_that_the_tokenizer_appends() -> None:
    made = copy.deepcopy(trained("sentencepiece"))
    whole = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.backend_tokenizer.post_processor = whole
    for text in ("the cat", "a dog</s> ran", "the mat</s>", ""):
        assert text_ids(text, made) == trained("sentencepiece")(text)["input_ids"]
        assert made(text)["input_ids"] == [*text_ids(text, made), 1]
    assert text_ids("<s>the cat", made) == text_ids("the cat", made), "it begins with one beginning"
    made.bos_token = "</s>"
    made.backend_tokenizer.post_processor = processors.ByteLevel()
    assert text_ids("</s>", made) == [1], "a text that is nothing else stays"
