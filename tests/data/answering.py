"""Toys for answers: a word tokenizer with a chat template, a random target that ends at times, and a quick answerer."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.answers.chats import AnswerSettings, OngoingChat, Outcome, Reply
from data.answers.files import Work, write_answers
from data.text.records import Record, parse
from inference.target.target import Target

SPECIAL = ["<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
WORDS = 60
ENDS = range(50, 56)  # further tokens that end an answer, so that some end early
TEMPLATE = (
    "{% if enable_thinking %}<|system|> w1 <|end|> {% endif %}"
    "{% for t in tools or [] %}<|system|> {{ t.function.name }} <|end|> {% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
LENGTH = 12


@functools.cache
def words(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1, … with a chat template."""
    vocabulary = {word: i for i, word in enumerate([f"w{i}" for i in range(WORDS)] + SPECIAL)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", unk_token="<unk>", extra_special_tokens=SPECIAL[1:4]
    )
    made.chat_template, made.name_or_path = template, "words"
    return made


def model() -> LlamaForCausalLM:
    """Return a random model, so lively that its answers differ, that says no special token but the end."""
    torch.manual_seed(0)
    shape: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words()), max_position_embeddings=96, initializer_range=0.6, **shape)
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight[WORDS : WORDS + 4] = 0
    made.generation_config = GenerationConfig(eos_token_id=[len(words()) - 1, *ENDS])
    return made


@functools.cache
def target() -> Target:
    """Return the random target."""
    return Target(model(), words(), "toy")


def settings(temperature: float = 0.0, **changed: Any) -> AnswerSettings:
    """Return how to answer, with some values changed."""
    values: dict[str, Any] = {
        "top_p": 0.9, "max_new_tokens": LENGTH, "keep_unfinished": True, "save_tokens": False, "seed": 0,
        "thinking": None, "template_args": {},
    }  # fmt: skip
    return AnswerSettings(temperature, **{**values, **changed})


def chat(id_: str, *questions: str) -> Record:
    """Return a chat whose recorded answers nobody should see again."""
    turns = [({"role": "user", "content": each}, {"role": "assistant", "content": "w0"}) for each in questions]
    return parse({"id": id_, "messages": [message for turn in turns for message in turn]}, 0, "chats")


def records(count: int = 8) -> list[Record]:
    """Return chats of one to three user turns."""
    return [chat(f"chat{n}", *(f"w{n} w{turn + 3}" for turn in range(1 + n % 3))) for n in range(count)]


def work(of: list[Record], how: AnswerSettings | None = None) -> Work:
    """Return records as work."""
    return Work(of, {"path": "chats"}, how or settings(), 2, {})


class Quick:
    """An answerer that needs no model: a prompt's answer is drawn from its tokens."""

    def __init__(self, context: int = 96, before: Callable[[str], object] = str) -> None:
        self.tokenizer, self.context, self.before = words(), context, before

    def answer(self, chats: Iterable[OngoingChat]) -> Iterator[Outcome]:
        """Answer one chat after the other."""
        for chat in chats:
            self.before(chat.id)
            while (token := chat.ask()) is not None:
                drawn = hashlib.sha256(f"{chat.seed()} {token}".encode()).digest()
                chat.take(Reply(" ".join(f"w{byte % 50}" for byte in drawn[: 2 + drawn[0] % 6]), drawn[1] > 40))
            yield chat.outcome()

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"by": "quick"}


def quick_bytes(of: list[Record], out: Path) -> bytes:
    """Let a quick answerer write `out`, and return it."""
    write_answers(work(of, settings(keep_unfinished=False)), Quick(), out)
    return out.read_bytes()
