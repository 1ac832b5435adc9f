"""Real data and tokenizers, where they lie beside the checkout."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.batches import pack
from data.config import DataConfig
from data.text.prompts import load_prompts, load_samples
from heads.common.resolvers import ROOT
from tests.data.chatml import PLAIN, TAGGED, Tokens

Config = Callable[..., DataConfig]


@pytest.mark.parametrize(
    ("name", "count", "categories"),
    [("spec_bench.jsonl", 480, 13), ("mt_bench.jsonl", 80, 8), ("HumanEval.jsonl.gz", 164, 1), ("sum.jsonl", 80, 1)],
)
def test_published_prompts(shared: Path, chat: PreTrainedTokenizerFast, name: str, count: int, categories: int) -> None:
    prompts = load_prompts(str(shared / "prompts" / name), chat, None)
    assert len({prompt.id for prompt in prompts}) == count
    assert len({prompt.category for prompt in prompts}) == categories
    assert all(str(chat.decode(prompt.token)).endswith("<|im_start|>assistant\n") for prompt in prompts)


@pytest.mark.parametrize(
    ("data", "share"),
    [
        ("sgd_dialogues_dev.jsonl.xz", (0.4, 0.7)),
        ("topical_chat.jsonl.xz", (0.3, 0.7)),
        ("sharegpt_gpt4_256.jsonl", (0.5, 0.95)),
        ("sharegpt_qwen3_256.jsonl", (0.5, 0.99)),
        ("fastchat_dummy.json", (0.3, 0.9)),
        ("synthetic_conversations_1k.jsonl", (0.3, 0.95)),
        ("gsm8k_test.jsonl", (0.3, 0.9)),
    ],
)
def test_real_chats(
    shared: Path, tokenizer_with: Tokens, config: Config, data: str, share: tuple[float, float]
) -> None:
    path = config(str(shared / "text" / data), max_tokens=100_000, on_bad="drop")  # one chat of Qwen3 has no answer
    samples = load_samples(path, tokenizer_with(PLAIN), 20)
    assert samples == load_samples(path, tokenizer_with(TAGGED), 20)
    assert share[0] <= sum(sum(s.loss_mask) for s in samples) / sum(len(s.loss_mask) for s in samples) <= share[1]


@pytest.mark.parametrize(
    ("target", "data"), [("craftgpt-5m", "sgd_dialogues_dev.jsonl.xz"), ("stories260K", "tinystories_heldout.txt")]
)
def test_real_targets_end_their_answers(shared: Path, config: Config, target: str, data: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "targets" / target)
    for sample in load_samples(config(str(shared / "text" / data)), tokenizer, 20):
        ends = [i for i, on in enumerate(sample.loss_mask) if on and not any(sample.loss_mask[i + 1 : i + 2])]
        assert {sample.token[i] for i in ends} == {tokenizer.eos_token_id}


def test_real_prompts_of_a_plain_target(shared: Path) -> None:
    folder = shared / "targets" / "pycode-7m"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = load_prompts(str(folder / "held_out_prompts.jsonl"), tokenizer, 20)
    assert len({prompt.id for prompt in prompts}) == 20
    assert all(tokenizer.decode(prompt.token) == prompt.text for prompt in prompts)


@pytest.mark.slow
def test_real_dialogues_fill_their_rows(shared: Path, config: Config) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny")
    path = config(str(shared / "text" / "sgd_dialogues_dev.jsonl.xz"), limit=800)
    packed = pack(load_samples(path, tokenizer), 2048)
    assert float((packed.document >= 0).float().mean()) > 0.97
