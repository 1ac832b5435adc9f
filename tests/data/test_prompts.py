import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from data.text.prompts import OPENING, load_prompts, load_training, records_to_answer, save_prompts, split_text
from tests.data.chatml import PLAIN, TAGGED, Tokens, load_samples
from tests.data.families import trained
from tests.refusals import refuses

Write = Callable[..., str]
Config = Callable[..., DataConfig]

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is it so?"},
    {"role": "assistant", "content": "It is.\nReally."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Now too, élan."},
]
TRAINED = ["It is.\nReally.<|im_end|>", "Now too, élan.<|im_end|>"]
WHOLE = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy is it so?<|im_end|>\n"
    "<|im_start|>assistant\nIt is.\nReally.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
    "<|im_start|>assistant\nNow too, élan.<|im_end|>\n"
)


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_the_mask_covers_the_answers_and_their_ends_and_nothing_else(
    tokenizer_with: Tokens, write: Write, config: Config, template: str
) -> None:
    tokenizer = tokenizer_with(template)
    (sample,) = load_samples(config(write({"id": "a", "messages": CHAT})), tokenizer)
    assert tokenizer.decode(sample.token) == WHOLE
    assert trained(sample, tokenizer) == TRAINED


def test_what_follows_the_last_answer_is_left_out(chat: PreTrainedTokenizerFast, write: Write, config: Config) -> None:
    chats = {"id": "a", "messages": CHAT[:4]}, {"id": "b", "messages": CHAT[:3]}
    left, whole = load_samples(config(write(*chats), dedup=False), chat)
    assert left.token == whole.token


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (PLAIN, CHAT[:2], "sample bad: the loss mask is all zeros"),
        (
            "{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ messages[0]['content'] }}",
            CHAT[1:],
            "sample bad: the loss mask is all zeros",
        ),
        (
            "{% for m in messages[1:] %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            CHAT[1:3],
            "sample bad: the loss mask is all ones",
        ),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}A: {% endif %}",
            CHAT,
            "sample bad: the chat template writes the answer otherwise",
        ),
        ("{{ raise_exception('roles must alternate') }}", CHAT, "sample bad: .*refuses it: roles must alternate"),
    ],
)
def test_a_chat_that_cannot_be_masked_is_named(
    tokenizer_with: Tokens, write: Write, config: Config, template: str, messages: list[dict[str, Any]], message: str
) -> None:
    refuses(message, load_samples, config(write({"id": "bad", "messages": messages})), tokenizer_with(template))


def test_chats_without_a_chat_template_or_a_question_are_refused_with_the_remedy(
    bare: PreTrainedTokenizerFast, chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    refuses(r"no chat template; put a chat_template.jinja", load_samples, config(write({"messages": CHAT})), bare)
    with pytest.raises(ValueError, match="prompt x: the chat has no user message"):
        load_prompts(write({"id": "x", "messages": CHAT[:1]}), chat, None)


def test_a_long_text_becomes_several_samples_without_loss(
    bare: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    for record in ({"text": "a tale"}, {"prompt": "a ", "answer": "tale", "text": "a tale"}):
        (sample,) = load_samples(config(write(record)), bare)
        assert (bare.decode(sample.token), set(sample.loss_mask)) == ("a tale<|im_end|>", {1})
    path = write({"id": "a", "text": "abcdefghij"}, {"id": "b", "text": ""})
    samples = load_samples(config(path, max_tokens=4), bare)
    assert [(sample.id, bare.decode(sample.token)) for sample in samples] == [
        ("a", "abcd"),
        ("a#1", "efgh"),
        ("a#2", "ij<|im_end|>"),
    ]


@pytest.mark.usefixtures("tolerant")
def test_a_long_chat_is_cut_and_one_without_answer_dropped_and_counted(
    chat: PreTrainedTokenizerFast, write: Write, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    path = write({"id": "a", "messages": CHAT}, {"id": "b", "prompt": "p" * 100, "answer": "a"})
    with caplog.at_level(logging.WARNING):
        (sample,) = load_samples(config(path, max_tokens=90, on_bad="drop"), chat)
    assert (sample.id, trained(sample, chat)) == ("a", TRAINED[:1])
    assert str(chat.decode(sample.token)).endswith(TRAINED[0])
    assert "1 truncated at data.max_tokens; 1 dropped, answers beyond data.max_tokens" in caplog.text
    with pytest.raises(ValueError, match=r"nothing is left .*2 dropped, answers beyond data\.max_tokens"):
        load_samples(config(path, max_tokens=9, on_bad="drop"), chat)
    with pytest.raises(ValueError, match=r"sample a: data\.max_tokens=9 cuts its answers away; raise it"):
        load_samples(config(path, max_tokens=9), chat)


def test_limits_and_the_held_out_end(bare: PreTrainedTokenizerFast, write: Write, config: Config) -> None:
    path = write(*({"id": str(i), "text": f"number {i}"} for i in range(6)))

    def ids(**changed: Any) -> list[str]:
        return [sample.id for sample in load_samples(config(path, **changed), bare)]

    assert ids() == list("012345")
    assert ids(held_out=2) == list("0123")
    assert ids(held_out=2, limit=3) == list("012")
    assert [p.id for p in load_training(config(path, held_out=2), bare, 9).held_out] == list("45")
    assert [p.id for p in load_training(config(path, held_out=2), bare, 1).held_out] == ["4"]
    assert [p.id for p in records_to_answer(config(path, held_out=2), None)] == list("0123")
    assert ids(held_out=6) == list("01234")
    data = config(path, held_out=1, prompts=write({"id": "q", "prompt": "three"}, name="prompts.jsonl"))
    assert (len(load_samples(data, bare)), [p.id for p in load_training(data, bare, 9).held_out]) == (6, ["q"])


@pytest.mark.parametrize(
    ("record", "text", "system"),
    [
        ({"turns": ["why", "really"], "category": "qa"}, "why", ""),
        ({"messages": CHAT, "category": "qa"}, "Why is it so?", "Be brief."),
        ({"prompt": "def f():\n", "answer": "x", "category": "qa"}, "def f():\n", ""),
    ],
)
def test_prompts_are_first_turns(
    chat: PreTrainedTokenizerFast,
    bare: PreTrainedTokenizerFast,
    write: Write,
    record: dict[str, Any],
    text: str,
    system: str,
) -> None:
    path = write({"question_id": 9, **record})
    (prompt,) = load_prompts(path, chat, None)
    told = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    assert (prompt.id, prompt.category, prompt.text, prompt.system) == ("9", "qa", text, system)
    assert chat.decode(prompt.token) == f"{told}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    (prompt,) = load_prompts(path, bare, None)
    assert bare.decode(prompt.token) == text


OPENED = "Once upon a time, there was a little girl named Lily, who loved to play outside. One day she found a "
THINGS = ["ball", "key", "dog", "bird", "boat", "coin", "hat", "shell"]


def test_stories_that_open_alike_give_prompts_that_differ(chat: PreTrainedTokenizerFast, write: Write) -> None:
    told = " and ran to show the {0} to her mother, who had never seen such a {0} before and asked whose {0} it was."
    stories = [f"{OPENED}{thing}" + 2 * told.format(thing) for thing in THINGS]
    prompts = load_prompts(write(*({"text": story} for story in stories)), chat, None)
    assert len({tuple(prompt.token) for prompt in prompts}) == len(THINGS)
    for prompt, story in zip(prompts, stories, strict=True):
        token, rest = split_text(story, chat)
        assert token == prompt.token
        assert story.endswith(" " + str(chat.decode(token + rest)))  # from a word's start on, and to the end
        assert OPENING // 2 < len(token) <= OPENING


def test_a_plain_prompt_does_not_end_by_a_tokenizers_own_end_token(bare: PreTrainedTokenizerFast, write: Write) -> None:
    eos = str(bare.eos_token)
    whole = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, bare.eos_token_id)])
    bare.backend_tokenizer.post_processor = whole
    texts = {"text": "abcdef"}, {"text": "abc " * OPENING}, {"prompt": "why"}
    prompts = load_prompts(write(*texts), bare, None)
    assert prompts[0].text == "abc"  # the first half of a short text
    assert [prompt.token[-1:] == [bare.eos_token_id] for prompt in prompts] == [False] * 3
    assert bare.decode(prompts[2].token) == "why"


def test_saved_prompts_come_back_token_for_token(
    chat: PreTrainedTokenizerFast, bare: PreTrainedTokenizerFast, write: Write, tmp_path: Path
) -> None:
    prompts = load_prompts(write({"text": "abc" * OPENING}, {"messages": CHAT, "category": "qa"}), chat, None)
    save_prompts(prompts, tmp_path / "saved.jsonl")
    assert load_prompts(str(tmp_path / "saved.jsonl"), bare, None) == prompts
    assert load_prompts(str(tmp_path / "saved.jsonl"), chat, 1) == prompts[:1]
