"""Sampling with a published head has the law of sampling without it: chi-square tests, and rules that fail them."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from eval.measures.chi_square import ALPHA, p_value
from heads.base import Features
from heads.formats.custom_generate import decoding
from heads.formats.custom_generate.decoding import Drafts, Sequence, Settings, decode
from heads.formats.custom_generate.target import Embeddings, Seen, Target

VOCAB, LENGTH, DRAWS = 5, 3, 2000  # tokens, of a text, texts
PROMPT = [0, 1]


class Table(Target):
    """A model whose next token depends on the last one."""

    def __init__(self) -> None:
        self.law = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
        self.rows = 0

    def run(self, token: Tensor, scored: int) -> Seen:
        self.rows += len(token)
        nothing = torch.zeros(1, len(token), 1)
        return Seen(Features(token[None], nothing[:, :, None], nothing, token[None]), self.law[token[-scored:]])

    def crop(self, count: int) -> None:
        self.rows -= count


class Guessing(Drafts):
    """A head of another law, which depends on the last token too and knows one token less."""

    depth = 2
    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.law = Table().law + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 0.8
        self.law[:, 2] = float("-inf")

    def restart(self) -> None:
        pass

    def commit(self, features: Features, token: Tensor) -> Tensor:
        return self.law[token[-1]]

    def draft(self, token: Tensor) -> Tensor:
        return self.law[token[-1]]


class Plain(Embeddings):
    """A model's sizes."""

    def __init__(self) -> None:
        self.context = 100


def settings() -> Settings:
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)])
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + LENGTH)])
    return Settings(processors, criteria, None, GenerationConfig(do_sample=True), 2)


def expected(table: Table) -> dict[tuple[int, ...], float]:
    """Return the law of the texts."""
    logits = table.law / 0.8
    law = logits.masked_fill(logits < logits.topk(4).values[:, -1:], float("-inf")).double().softmax(-1)
    texts = itertools.product(range(VOCAB), repeat=LENGTH)
    return {text: math.prod(float(law[a, b]) for a, b in itertools.pairwise([PROMPT[-1], *text])) for text in texts}


def measured() -> tuple[float, float]:
    """Return the p-value of drawn texts, and how many tokens a pass gave."""
    torch.manual_seed(0)
    table, head, embeddings, asked, prompt = Table(), Guessing(), Plain(), settings(), torch.tensor(PROMPT)
    counts, passes, tokens = Counter[tuple[int, ...]](), 0, 0
    for _ in range(DRAWS):
        table.rows = 0
        written = decode(table, head, embeddings, prompt, Sequence(prompt[None], asked))
        counts[tuple(written.ids[0, len(PROMPT) :].tolist())] += 1
        passes, tokens = passes + written.passes, tokens + written.verified
        assert table.rows == len(PROMPT) + LENGTH - 1
    law = expected(table)
    likely = {text: share for text, share in law.items() if DRAWS * share >= 5}
    cells = [(counts[text], DRAWS * share) for text, share in likely.items()]
    cells.append((DRAWS - sum(count for count, _ in cells), DRAWS - math.fsum(each for _, each in cells)))
    statistic = math.fsum((count - wanted) ** 2 / wanted for count, wanted in cells)
    return p_value(statistic, len(cells) - 1), tokens / passes


def test_texts_are_drawn_from_the_models_law() -> None:
    chance, tau = measured()
    assert chance > ALPHA
    assert tau > 1.3


def always(p: Tensor, q: Tensor, drafted: int) -> tuple[Tensor, bool]:
    return p, True


def again(p: Tensor, q: Tensor, drafted: int) -> tuple[Tensor, bool]:
    """Draws from the model's law where a draft was refused, and not from what is left of it."""
    return p, bool(torch.rand(()) * q[drafted] < p[drafted])


@pytest.mark.parametrize("rule", [always, again])
def test_a_wrong_rule_is_caught(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "verified", rule)
    chance, _ = measured()
    assert chance < ALPHA


def test_a_draft_of_the_same_law_always_stands() -> None:
    law = torch.tensor([0.1, 0.2, 0.7])
    assert all(decoding.verified(law, law, i % 3)[1] for i in range(200))
    rest, kept = decoding.verified(torch.tensor([0.0, 0.4, 0.6]), torch.tensor([0.5, 0.5, 0.0]), 0)
    assert not kept
    torch.testing.assert_close(rest, torch.tensor([0.0, 0.0, 0.6]))
