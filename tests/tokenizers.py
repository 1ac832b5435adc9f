"""Three kinds of tokenizers, trained on the spot: byte-level BPE, sentencepiece-like BPE with byte tokens, words."""

import functools
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "the old cat sat on the mat and the dog ran to the other cat",
    "a dog and a cat ran on the old mat, then sat on the other mat",
    "naïve café: élan vital, naïve élan\n\tindented text\n",
    "日本語の文と日本の文字 😀 ぁ 日本語",  # two of the three bytes of ぁ are the same
    "def other(cat):\n    return cat.mat(dog)\n",
]
KINDS = ("bytes", "metaspace", "sentencepiece", "words")


@functools.cache
def trained(kind: str, size: int = 340) -> PreTrainedTokenizerFast:
    """Return a trained tokenizer with <s> and </s>; the sentencepiece-like one puts <s> before a text."""
    special = ["<s>", "</s>", "<unk>"]
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.post_processor = processors.ByteLevel(trim_offsets=True)  # a token's span leaves its space out
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "metaspace":
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    elif kind == "sentencepiece":
        return _sentencepiece(special, size)
    else:
        made = Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    return _wrapped(made)


def _sentencepiece(special: list[str], size: int) -> PreTrainedTokenizerFast:
    """Return what transformers makes of a sentencepiece BPE: spaces by normalisation, unknown characters as bytes."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    plain = [text for text in TEXT if text.isascii()]  # so that other characters need byte tokens
    learner.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=size - 259, show_progress=False))
    state = json.loads(learner.to_str())["model"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(merge) for merge in state["merges"]]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = learner.normalizer
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _wrapped(made)


def _wrapped(made: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
