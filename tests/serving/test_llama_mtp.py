"""llama.cpp's server on this CPU drafts with a head of ours as its target's own MTP module.

Its own converter reads the folder that `format=checkpoint` writes; one file is served with drafting and without. The
module's first row is there the first token beside a state of zeros (of a server's first text; later the last text's
state), which is followed here so that the counters can be compared.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast

from heads.base import Features
from inference.drafters.head import MtpDrafter
from inference.target.target import Target
from tests import families, toys
from tests.serving import test_checkpoint as toy
from tests.serving.test_llama import TOKENS, accepted_by_us, chain, check_counts, converted, counted, served, server

pytestmark = pytest.mark.serving
SPECIAL = ["[gMASK]", "<|user|>", "<|endoftext|>", "<|observation|>"]  # which the converter wants of a GLM
DEPTH = 2
DRAFTING = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(DEPTH), "-td", "1", "-ctkd", "f32", "-ctvd", "f32"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters: llama.cpp reads none of words."""
    characters = [chr(ord("A") + token) for token in range(toys.VOCAB - len(SPECIAL) - 1)]
    vocabulary = {word: token for token, word in enumerate([*characters, "AB", *SPECIAL])}
    bpe = Tokenizer(models.BPE(vocabulary, [("A", "B")]))
    bpe.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[2], bos_token=SPECIAL[0])


def target_of(folder: Path, architecture: str) -> Target:
    """Return a toy that never writes a special token, at which llama.cpp would end a text."""
    target = toy.target_of(folder, architecture)
    with torch.no_grad():
        target.model.get_output_embeddings().weight[-len(SPECIAL) :] = 0
    target.model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return Target.load(str(folder), "float32", "cpu")


def preceded(rows: Features) -> Features:
    """Return the rows behind one of zeros, whose next token is the first."""
    return Features(*(torch.cat([torch.zeros_like(each[:, :1]), each], 1) for each in rows[:4]))


def accepted(target: Target, head: Any, prompt: list[int], answer: list[int], *, first_row: bool) -> list[int]:
    """Return how many drafted tokens are accepted behind each token of an answer."""
    token = torch.tensor([prompt + answer])
    rows = target.features(token, torch.zeros_like(token), head.feature_layers)
    rows = preceded(rows) if first_row else rows
    count, right = torch.zeros_like(rows.token[0]), torch.ones_like(rows.token[0], dtype=torch.bool)
    for depth, draft in enumerate(head.unroll(rows, DEPTH), 1):
        right &= (
            head.compute_logits(draft.state, depth).argmax(-1)[0]
            == pad(rows.token[0], (0, depth + 1), value=-1)[depth + 1 :]
        )
        count += right
    return count[len(prompt) - 1 + first_row : -1].tolist()


def passes(behind: list[int]) -> list[int]:
    """Return the accepted tokens of each pass that drafts; `behind` is what is accepted behind each token."""
    steps, written = [], 1
    while (room := min(DEPTH, len(behind) - 1 - written)) > 0:
        steps.append(min(behind[written - 1], room))
        written += steps[-1] + 1
    return steps


def by_position(steps: list[int]) -> list[int]:
    return [sum(step > position for step in steps) for position in range(DEPTH)]


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_llama_cpp_drafts_with_the_head_as_the_targets_own_module(tmp_path: Path, architecture: str) -> None:
    target = target_of(tmp_path / "target", architecture)
    answers = [families.generated(target, prompt, TOKENS) for prompt in toy.PROMPTS]
    texts = list(zip(toy.PROMPTS, answers, strict=True))
    head = toy.head_of(target, architecture)
    toy.train(head, target, [prompt + answer for prompt, answer in texts[:4]], DEPTH)
    out = toy.stitched(tmp_path, head, target)
    file = converted(tmp_path / "stitched.gguf", out)
    with server(tmp_path / "plain.log", file) as url:
        assert served(url, toy.PROMPTS) == answers
    counts = Counter[str]()
    for prompt, answer in texts:
        with server(tmp_path / "drafting.log", file, *DRAFTING) as url:
            assert served(url, [prompt]) == [answer]
            counts.update(counted(url))
    again = Target.load(str(out), "float32", "cpu")
    drafter = MtpDrafter(MtpDrafter.Config(None, chain(DEPTH)), again, "mtp")
    ours, theirs = (
        [step for text in texts for step in passes(accepted(again, drafter.head, *text, first_row=row))]
        for row in (False, True)
    )
    print(f"{architecture}: {by_position(ours)} in our verifier, of {len(ours)} drafts")
    assert by_position(ours) == by_position(accepted_by_us(again, drafter, *map(list, zip(*texts, strict=True)), DEPTH))
    check_counts(architecture, counts, theirs, DEPTH)
