"""Tokens to text as they come."""

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"


def decode(tokenizer: PreTrainedTokenizerBase, token: list[int], special: bool = False) -> str:
    """Return the text of tokens as it is, that of special tokens only if wanted."""
    return str(tokenizer.decode(token, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


class TextStream:
    """Decodes one token at a time and never shows part of a character.

    A token is decoded together with those before it, because what it reads depends on them; only the tokens since the
    last but one piece of text are decoded again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: bool = False) -> None:
        self.tokenizer, self.special = tokenizer, special
        self.tokens: list[int] = []
        self.begin = self.shown = 0  # tokens[begin:shown] is the last piece shown, the context of the next

    def push(self, token: int) -> str:
        """Return the text that the token completes, empty while a character lacks bytes."""
        self.tokens.append(token)
        piece = self.rest()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self.begin, self.shown = self.shown, len(self.tokens)
        return piece

    def rest(self) -> str:
        """Return the text that is held back."""
        shown, tokens = self.tokens[self.begin : self.shown], self.tokens[self.begin :]
        before, whole = (decode(self.tokenizer, some, self.special) for some in (shown, tokens))
        return whole[len(before) :]
