"""Prompt lookup against transformers' own candidates and generate, and against a scan of the whole text."""

import random

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from inference.drafters.prompt_lookup import PromptLookup, TextIndex
from inference.protocol import DraftContext
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY
from tests import toys
from tests.inference.model_free import make

DRAWS = RequestRng(0, 0, coupled=False)


def proposed(source: TextIndex, text: list[int], max_draft_depth: int = 99) -> list[int]:
    tree = source.propose(DraftContext(text, GREEDY, DRAWS, max_draft_depth)).tree
    assert tree.parent.tolist() == list(range(-1, len(tree.token) - 1))
    assert int(tree.token[0]) == text[-1]
    return tree.token[1:].tolist()


def texts(seed: int) -> list[list[int]]:
    """Return a text that repeats itself, at growing lengths: as it grows while it is decoded."""
    chance = random.Random(seed)
    text = chance.choices(range(chance.choice([2, 3, 8])), k=chance.randint(1, 5))
    grown = []
    for _ in range(12):
        grown.append(list(text))
        begin = chance.randrange(len(text))
        text += chance.choices(range(8), k=chance.randint(0, 2)) + text[begin : begin + chance.randint(1, 4)]
    return grown


def test_candidates_equal_transformers() -> None:
    """Longest n-gram first, its first occurrence, nothing from an end token on, and nothing where no room is left."""
    eos, several = frozenset({5, 6}), 0
    for seed in range(30):
        source = make("prompt_lookup_hf", toys.target(), tokens=4)
        source.eos = eos
        grown = texts(seed)
        state = source.start(grown[0])
        for text in grown:
            for room in (0, 1, 99):
                limit = len(text) + 1 + room
                theirs = PromptLookupCandidateGenerator(torch.tensor(sorted(eos)), 4, 2, limit)
                candidates = theirs.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
                # transformers drafts past the answer's end and cuts what was accepted there
                assert proposed(state, text, room) == candidates[:room]
                several += len(candidates) > 1
    assert several > 240


def test_defaults_are_those_of_transformers() -> None:
    theirs, source = PromptLookupCandidateGenerator(), make("prompt_lookup_hf", toys.target())
    assert source.config.tokens == theirs.num_output_tokens
    assert source.config.ngram_max == theirs.max_matching_ngram_size
    assert source.config.ngram_min == 1


def scanned(text: list[int], config: PromptLookup.Config) -> list[int]:
    """Look through the whole text."""
    for n in range(config.ngram_max, config.ngram_min - 1, -1):
        embeddings = [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]
        if embeddings and n < len(text):
            end = embeddings[0] if config.match == "first" else embeddings[-1]
            return text[end : end + config.tokens]
    return []


@pytest.mark.parametrize("match", ["first", "last"])
@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4), (5, 5)])
def test_the_index_finds_what_a_scan_finds(least: int, most: int, match: str) -> None:
    found = 0
    for seed in range(20):
        source = make("prompt_lookup", toys.target(), ngram_min=least, ngram_max=most, match=match)
        grown = texts(seed)
        state = source.start(grown[0])
        for text in grown:
            expected = scanned(text, source.config)
            assert proposed(state, text) == expected
            found += bool(expected)
    assert found > 12
