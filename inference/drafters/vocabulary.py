"""Between two tokenizers: the same vocabulary proven, one vocabulary mapped to another, text encoded again.

Tokens of different tokenizers are compared as the bytes that they add in the middle of a text: "Ġthe" of a byte-level
BPE, "▁the" of a sentencepiece model and the word "the" of a word-level one are all b" the", and the byte token "<0x0A>"
is a newline. Special tokens add no bytes; they are compared by name.
"""

import json
import re
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from inference.target.target import Target
from inference.text_stream import decode

BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # of GPT-2's alphabet of bytes


class SameVocabulary:
    """How an assistant with the target's tokenizer reads and writes; `SharedVocabulary` is for one with another.

    The models' lm_heads may be padded to different sizes, A of the assistant's and V of the target's. Tokenizers that
    differ are refused, with where.
    """

    def __init__(self, target: Target, assistant: Target) -> None:
        if difference := _difference(target.tokenizer.get_vocab(), assistant.tokenizer.get_vocab()):
            raise ValueError(f"{assistant.name} has another tokenizer than {target.name}: {difference}; use match=tli")
        self.ours, self.theirs = target.embeddings.vocab_size, assistant.embeddings.vocab_size

    def prompt(self, token: list[int]) -> list[int]:
        """Return a prompt in the assistant's tokens: without those that only the target's padding numbers."""
        return self.follow(token)

    def follow(self, token: list[int]) -> list[int]:
        """Return the same of tokens that come after the prompt, each by itself."""
        return [t for t in token if t < self.theirs]

    def to_assistant(self, token: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        """Return drafted tokens; -inf keeps those that only the padding numbers out of every q, rank does not."""
        return token.clamp_max(self.theirs - 1)

    def to_target(self, logits: Float[Tensor, "N A"]) -> Float[Tensor, "N V"]:
        """Cut or pad the logits to the target's vocabulary."""
        logits = logits[:, : self.ours]
        return torch.nn.functional.pad(logits, (0, self.ours - logits.shape[1]), value=float("-inf"))


class SharedVocabulary:
    """Token-level intersection (TLI; Timor et al., arXiv 2502.05202): the assistant drafts tokens that both know.

    Its q is renormalised over them, and so is a distribution of the target's tokens: p/q verification stays exact. What
    the target writes outside is spelled with the assistant's tokens.

    Raises:
        ValueError: no token is shared, or a tokenizer is of a kind whose tokens cannot be read as bytes.
    """

    def __init__(self, target: Target, assistant: Target) -> None:
        self.source, self.destination = target.tokenizer, assistant.tokenizer
        self.bytes = token_bytes(target)
        self.numbers = _numbers(token_bytes(assistant))
        self.one = _shared(target, assistant, self.bytes, self.numbers)
        if not self.one:
            raise ValueError(f"{assistant.name} shares no token with {target.name}: choose another one")
        self.size = target.embeddings.vocab_size
        self.ours, self.theirs = torch.tensor([*self.one.items()], device=assistant.device).T
        self.number = torch.zeros(self.size, dtype=torch.long, device=assistant.device)
        self.number[self.ours] = self.theirs

    def prompt(self, token: list[int]) -> list[int]:
        """Encode the prompt's text, as the assistant was trained to read it: behind its first token, if it has one."""
        first = self.destination("a")["input_ids"][:1]
        text = self.destination(decode(self.source, token), add_special_tokens=False)
        return (first if first == [self.destination.bos_token_id] else []) + text["input_ids"]

    def follow(self, token: list[int]) -> list[int]:
        """Return for each token its one counterpart, or its bytes spelled longest token first."""
        return [number for t in token for number in ([self.one[t]] if t in self.one else self._spell(t))]

    def to_assistant(self, token: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        """Return the counterparts; a token without one has no probability, and its node's answer no use."""
        return self.number[token.to(self.number.device)]

    def to_target(self, logits: Float[Tensor, "N A"]) -> Float[Tensor, "N V"]:
        """Put the shared columns where the target has them."""
        scattered = logits.new_full((len(logits), self.size), float("-inf"))
        scattered[:, self.ours] = logits[:, self.theirs]
        return scattered

    def _spell(self, token: int) -> list[int]:
        rest, spelled = self.bytes.get(token, b""), []
        while rest:
            length = next((n for n in range(len(rest), 0, -1) if rest[:n] in self.numbers), None)
            if length is None:
                return []  # the assistant cannot read it and goes on without
            spelled.append(self.numbers[rest[:length]])
            rest = rest[length:]
        return spelled


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """Return the first difference of two vocabularies in words, empty if there is none."""
    if ours == theirs:
        return ""
    token = min((t for t in {**ours, **theirs} if ours.get(t) != theirs.get(t)), key=lambda t: ours.get(t, 1 << 60))
    number, other = ours.get(token, "missing"), theirs.get(token, "missing")
    return f"token {token!r} is {number} in the target's vocabulary of {len(ours)} and {other} in its {len(theirs)}"


def token_bytes(model: Target) -> dict[int, bytes]:
    """Return the bytes that tokens but special ones add in the middle of a text; refuse those without such."""
    steps = _decoder_steps(model)
    added, special = model.tokenizer.added_tokens_decoder, set(_special(model.tokenizer).values())
    return {
        number: piece.encode() if number in added else _piece_bytes(piece, steps)
        for piece, number in model.tokenizer.get_vocab().items()
        if number < model.embeddings.vocab_size and number not in special
    }


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    added = {str(t): number for number, t in tokenizer.added_tokens_decoder.items() if t.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def _decoder_steps(model: Target) -> list[dict[str, Any]]:
    """Return the steps of the tokenizer's decoder; none for a word-level one, whose words are joined by spaces."""
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{model.name}: its tokenizer shows no table of tokens to compare: choose another one")
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    for step in steps:
        byte_wise = step["type"] in ("ByteLevel", "Metaspace", "ByteFallback", "Fuse", "Strip")
        if not (byte_wise or (step["type"] == "Replace" and "String" in step["pattern"])):
            raise ValueError(
                f"{model.name}: tokens of a tokenizer with a {step['type']} decoder cannot be compared one by one: "
                "choose another one"
            )
    return steps


def _piece_bytes(piece: str, steps: list[dict[str, Any]]) -> bytes:
    """Decode one token as its tokenizer would in the middle of a text, to bytes."""
    if not steps:
        return b" " + piece.encode()
    for step in steps:
        if step["type"] == "ByteLevel" and all(c in BYTE_OF for c in piece):
            return bytes(BYTE_OF[c] for c in piece)
        if step["type"] == "ByteFallback" and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)):
            return bytes([int(byte[1], 16)])
        if step["type"] == "Metaspace":
            piece = piece.replace(step["replacement"], " ")
        if step["type"] == "Replace":
            piece = piece.replace(step["pattern"]["String"], step["content"])
    return piece.encode()


def _numbers(pieces: dict[int, bytes]) -> dict[bytes, int]:
    """Return which token stands for which bytes; of several, the last one, because byte tokens come first."""
    return {piece: number for number, piece in sorted(pieces.items()) if piece}


def _shared(target: Target, assistant: Target, ours: dict[int, bytes], theirs: dict[bytes, int]) -> dict[int, int]:
    """Return the pairs of tokens that are the same in both vocabularies, each token in one pair at most."""
    pairs = {number: theirs[piece] for piece, number in _numbers(ours).items() if piece in theirs}
    other = _special(assistant.tokenizer)
    pairs |= {number: other[name] for name, number in _special(target.tokenizer).items() if name in other}
    embeddings = target.tokenizer.eos_token_id, assistant.tokenizer.eos_token_id
    if None not in embeddings and embeddings[0] not in pairs and embeddings[1] not in pairs.values():
        pairs[embeddings[0]] = embeddings[1]
    return {a: b for a, b in pairs.items() if a < target.embeddings.vocab_size and b < assistant.embeddings.vocab_size}
