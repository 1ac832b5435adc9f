"""Along a text that the target drew, what is accepted is what decoding accepts, and what the laws say."""

import itertools
from dataclasses import replace

import pytest
import torch

from eval.inputs.workloads import Text, of_answer, write
from eval.measures import metrics
from eval.teacher_forced import Overlap, expected, overlap, rank_text, replay
from heads.base import Features
from inference.decode import Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.verification.sample import Sampling, distribution
from tests import drafting, toys

HOT = Settings(40, Sampling(3.0, 0, 1.0))  # at which a random head and target agree now and then
PROMPTS = [toys.prompt(i, 12) for i in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "static", "dynamic"])
def test_sampled_tiers_agree_along_the_same_text(kind: str) -> None:
    target, tree = toys.target(), toys.TREES[kind]
    head = toys.head("eagle", target)
    how = replace(HOT, rule="token" if kind == "chain" else "auto")
    decoded = [
        speculate(target, HeadDrafter(head, tree, "eagle"), prompt, replace(how, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]
    texts = [of_answer(target, prompt, run.tokens, HOT) for prompt, run in zip(PROMPTS, decoded, strict=True)]
    if kind == "chain":
        told = [expected(overlap(target, head, text, HOT.sampling, tree.depth), tree.depth) for text in texts]
        live, other = metrics.tau_interval(decoded, 0), metrics.pooled_interval(told, 0)
        assert live is not None
        assert other is not None
        assert max(live[0], other[0]) <= min(live[1], other[1])
        assert live[1] - live[0] < 0.15, "the interval is too wide to compare"
    else:  # what was chosen without drawing is accepted where it is the text
        grown = [tree] if kind == "dynamic" else []
        for text, run in zip(texts, decoded, strict=True):
            steps = replay(rank_text(target, head, text, grown, 4), tree)
            assert [(step.nodes, step.accepted) for step in steps] == [
                (step.drafted, step.accepted) for step in run.steps
            ]
    accepted = metrics.acceptance(decoded).accepted_by_depth
    assert accepted[0] > 0.04, "too little was accepted to compare"


def test_the_expected_passes_that_draft_the_end_of_a_text_commit_no_bonus() -> None:
    text = Text(list(range(7)), 2, 8)  # 5 tokens written, where 8 are allowed: drafts reach beyond the end
    share = torch.tensor([[0.9, 0.5], [0.2, 0.4], [0.7, 0.3], [0.6, 0.0]])
    found = metrics.pooled([expected(Overlap(text, share, share), 2)])
    assert found.tau_within_depth[1] == pytest.approx(found.tau)
    assert found.tau_within_depth[1] < 1 + sum(found.accepted_by_depth) - 0.1


def test_what_passes_are_expected_is_the_sum_over_all_verdicts() -> None:
    text = Text(list(range(9)), 2, 6)  # 7 tokens written, but only 6 allowed: the last draft is cut
    share = torch.tensor([[0.9, 0.5], [0.2, 0.4], [0.7, 0.3], [0.6, 1.0], [1.0, 0.8], [0.5, 0.0]])
    found = expected(Overlap(text, share, share), 2)

    def walk(made: int) -> tuple[float, float, float]:
        """Return the expected passes, accepted and drafted tokens from here on, verdict by verdict."""
        if made >= text.generated:
            return 0.0, 0.0, 0.0
        depth = max(0, min(2, text.limit - made - 1))
        passes, accepted, drafted = 1.0, 0.0, float(depth)
        for verdict in itertools.product([True, False], repeat=depth):
            chance, count = 1.0, 0
            for d, right in enumerate(verdict):
                p = float(share[made - 1, d])
                chance *= p if right else 1 - p
                count += right and all(verdict[:d])
            more = walk(min(made + count + 1, text.generated))
            passes += chance * more[0]
            accepted += chance * (count + more[1])
            drafted += chance * more[2]
        return passes, accepted, drafted

    passes, accepted, drafted = walk(1)
    assert found.steps == pytest.approx(passes)
    assert found.accepted == pytest.approx(accepted)
    assert found.drafted == pytest.approx(drafted)
    assert found.tokens == 6


def test_shares_are_of_the_laws_of_every_row_by_itself() -> None:
    target, sampling = toys.target(), Sampling(0.8, 12, 0.95)
    head = toys.head("eagle", target)
    (text,) = write(target, [toys.prompt(3)], Settings(12, sampling, seed=5))
    found = overlap(target, head, text, sampling, 3)
    token = torch.tensor(text.token)
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    seen = 0
    with torch.inference_mode():
        for made in range(1, text.generated):
            root = text.start + made - 1  # the token a step begins after
            rows = Features(*(part[:, :root] for part in features[:4]))
            state, level = drafting.extend(head, None, rows, token[1 : root + 1])
            for depth in range(3):
                place = root + 1 + depth
                if place >= len(token):
                    assert found.accept_prob[made - 1, depth] == 0
                    assert found.common[made - 1, depth].isnan()
                    continue
                p = distribution(target.embeddings.logits(features.last_hidden[0, place - 1]), sampling)
                q = distribution(drafting.logits(head, level)[0], sampling)
                ratio = (q[token[place]] / p[token[place]]).clamp_max(1)
                torch.testing.assert_close(found.accept_prob[made - 1, depth], ratio, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(
                    found.common[made - 1, depth], torch.minimum(p, q).sum(), atol=1e-5, rtol=1e-4
                )
                torch.testing.assert_close((p * (q / p.clamp_min(1e-30)).clamp_max(1)).sum(), torch.minimum(p, q).sum())
                seen += 1
                if depth < 2:
                    path = torch.ones(1, depth + 1, dtype=torch.bool)
                    level = drafting.expand(head, state, level, token[place][None], torch.tensor([0]), path)
    assert seen > 20
