import pytest
import torch

from heads.base import DraftVocabulary
from heads.modules.top_k import TopLogProbs, argmax, full_log_probs, log_probs, most_likely, top_log_probs


@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_whole_is_a_law_with_the_same_top(k: int) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    top = top_log_probs(logits, k)
    law, true = full_log_probs(top, 40), logits.log_softmax(-1)
    assert torch.allclose(law.exp().sum(-1), torch.ones(6))
    assert torch.allclose(law.gather(-1, top.ids), true.gather(-1, top.ids), atol=1e-5)
    rest = law.exp().scatter(-1, top.ids, 0)
    assert torch.allclose(rest.sum(-1), true.exp().scatter(-1, top.ids, 0).sum(-1), atol=1e-6)
    others = rest[rest > 0].view(6, -1)
    assert torch.allclose(others, others[:, :1].expand_as(others))


def test_a_law_of_one_token_stays_finite() -> None:
    logits = torch.full((1, 40), -1e4)
    logits[0, 7] = 0
    law = full_log_probs(top_log_probs(logits, 3), 40)
    assert law.isfinite().all()
    assert law.argmax(-1).tolist() == [7]


@pytest.mark.parametrize("size", [5, 128, 640])
def test_the_likeliest_is_the_first_of_equals(size: int) -> None:
    law = torch.randint(9, (3, 40, size)).float()
    assert torch.equal(argmax(law), law.argmax(-1))
    law[1, 2, size // 2] = float("inf")
    assert argmax(law)[1, 2] == size // 2


@pytest.mark.parametrize("k", [1, 5, 40])
def test_a_pruned_vocabularys_share_needs_no_more_than_its_tokens(k: int) -> None:
    """Not even to be normalised; the most likely token of all is read off the top ones, of equals the first."""
    torch.manual_seed(0)
    logits = torch.randn(30, 40, dtype=torch.float64)
    logits[3:9, :] = logits[3:9, :].round()
    vocab = DraftVocabulary(13, 40)
    vocab.choose(torch.randint(1000, (40,)))
    best = logits.log_softmax(-1).topk(k, -1)
    top = TopLogProbs(best.indices, best.values)
    whole = full_log_probs(top, 40)
    assert log_probs(top, 40, None).equal(whole)
    torch.testing.assert_close(log_probs(top, 40, vocab), whole[:, vocab.ids], rtol=1e-12, atol=1e-12)
    assert most_likely(top).equal(whole.argmax(-1))
