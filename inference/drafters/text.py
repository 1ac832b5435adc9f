"""Text between two tokenizers, for drafts that are exchanged as text (SLEM; Timor et al., arXiv 2502.05202).

Encoding a text anew can cut it differently than its tokens did, and a long one takes time. So only its end is encoded,
from a few tokens back, and joined where the old and the new tokens begin to agree.
"""

from transformers import PreTrainedTokenizerBase

from inference.text_stream import UNFINISHED, TextStream

Span = tuple[int, int]  # first character of a token, and the one after its last


def decode(tokenizer: PreTrainedTokenizerBase, token: list[int]) -> str:
    """Return the text of tokens as it is, without special tokens."""
    return str(tokenizer.decode(token, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[Span]]:
    """Return the tokens of a text, without special tokens, and which characters each covers."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special token that the tokenizer begins a text with, if it does."""
    first = tokenizer("a")["input_ids"][:1]
    return list(first) if first == [tokenizer.bos_token_id] else []


class GrowingText:
    """The text of a sequence of tokens that grows, and the same text in another tokenizer's tokens.

    Attributes:
        token: the other tokenizer's tokens, its opening included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, lookbehind: int) -> None:
        self.tokenizer, self.other, self.lookbehind = tokenizer, other, lookbehind
        self.opening = opening(other)
        self.start([])

    def start(self, token: list[int]) -> None:
        """Take the tokens of a prompt."""
        self.stream = TextStream(self.tokenizer)
        self.stream.tokens, self.stream.shown = list(token), len(token)
        self.stream.begin = max(0, len(token) - self.lookbehind)
        self.text = decode(self.tokenizer, token)
        self._encode_all()

    def extend(self, token: list[int]) -> None:
        """Append tokens; bytes of an unfinished character wait for the rest of it."""
        piece = "".join(self.stream.push(t) for t in token)
        if piece:
            self.text += piece
            self._encode_end()

    @property
    def complete(self) -> bool:
        """Whether the text holds all of the tokens' bytes."""
        return not self.stream.rest() and not self.text.endswith(UNFINISHED)

    def _encode_all(self) -> None:
        encoded, spans = encode(self.other, self.text)
        self.token, self.starts = self.opening + encoded, [0] * len(self.opening) + [start for start, _ in spans]

    def _encode_end(self) -> None:
        """Encode the last tokens' text anew, and join it at the first token that stands where it stood before.

        The first character is left out: some tokenizers put a space before whatever they encode.
        """
        keep = len(self.token) - self.lookbehind
        if keep <= len(self.opening):
            return self._encode_all()
        begin = self.starts[keep]
        encoded, spans = encode(self.other, self.text[begin:])
        starts = [begin + start for start, _ in spans]
        old = {(self.starts[i], self.token[i]): i for i in range(keep, len(self.token))}
        for i, start_and_token in enumerate(zip(starts, encoded, strict=True)):
            if start_and_token in old and start_and_token[0] > begin:
                self.token[old[start_and_token] :], self.starts[old[start_and_token] :] = encoded[i:], starts[i:]
                return None
        return self._encode_all()


def continuation(tokenizer: PreTrainedTokenizerBase, context: list[int], text: str) -> list[int]:
    """Return tokens that add exactly `text` to the text of `context`, its last tokens; none if none are found.

    The text is encoded behind that of the context, as the tokenizer would write it. Where a token would span the
    border, something else stands before it, or nothing; nothing will not do where a tokenizer puts a space first.
    """
    before = decode(tokenizer, context)
    for left in (before, before[-1:], "", "\n", "."):
        encoded, spans = encode(tokenizer, left + text)
        first = next((i for i, (_, end) in enumerate(spans) if end > len(left)), len(spans))
        if decode(tokenizer, context + encoded[first:]) == before + text:
            return encoded[first:]
    return []
