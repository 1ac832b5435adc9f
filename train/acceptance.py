"""A head's acceptance during training: τ by the real verifier, and cheaper estimates from recorded features."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from eval.inputs.workloads import write
from eval.measures import metrics
from eval.teacher_forced import ranks, unrolled
from heads.base import Features
from heads.common.progress import progress
from heads.modules.vocab import scatter_logits
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.config import TrainerConfig


class AcceptanceEvaluator:
    """Measures heads on the same prompts: `trainer.eval_prompts` held-out ones, sampled by the seed."""

    def __init__(
        self, target: Target, prompts: list[list[int]], trainer: TrainerConfig, tree: TreeConfig, name: str,
        drafter: Callable[[Any, TreeConfig, str], Drafter] = HeadDrafter,
    ) -> None:  # fmt: skip
        sampled = random.Random(trainer.seed).sample(range(len(prompts)), min(trainer.eval_prompts, len(prompts)))
        self.target, self.prompts = target, [prompts[i] for i in sorted(sampled)]
        self.tree, self.name, self.seed, self.drafter = tree, name, trainer.seed, drafter
        self.groups = metrics.clustered(self.prompts)
        self.settings = RequestParams(trainer.eval_tokens, GREEDY)
        self.texts: list[tuple[Features, int]] | None = None
        # The conditions of τ besides the head: values are comparable only under equal ones.
        self.conditions = {
            "trainer.eval_prompts": len(self.prompts), "trainer.eval_tokens": trainer.eval_tokens,
            "prompts' fingerprint": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16],
            **{f"tree.{key}": value for key, value in asdict(tree).items()},
        }  # fmt: skip

    def tau(self, head: Any, halted: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Return τ of greedy decoding, pooled over the prompts, its 95 % interval, and P(a >= d).

        None if `halted` returned true before a prompt.
        """
        drafter = self.drafter(head, self.tree, self.name)
        generations = []
        try:
            for prompt in progress(self.prompts, "measuring τ"):
                if halted():
                    return None
                generations.append(speculate(self.target, drafter, prompt, self.settings))
        finally:
            self.target.idle.pop(drafter, None)  # drop its batch, which holds a copy of the head
        acceptance = metrics.acceptance(generations)
        return {
            "tau": acceptance.tau or 1.0,  # answers of one token have no step
            "tau_ci": metrics.tau_interval(generations, self.seed, self.groups),
            "accepted_by_depth": acceptance.accepted_by_depth,
        }

    @torch.inference_mode()
    def estimate(self, head: Any, halted: Callable[[], bool] = lambda: False) -> list[float] | None:
        """Return P(a >= k) of a greedy chain for k = 1 … the tree's depth, over every row of the target's answers.

        No verifier runs: answers and their features are computed once, and a head drafts from all rows at once. None if
        `halted` returned true before a prompt or an answer.
        """
        if self.texts is None:
            texts = []
            for prompt in progress(self.prompts, "writing texts to estimate on"):
                if halted():
                    return None
                for text in write(self.target, [prompt], self.settings):
                    token = torch.tensor(text.token, device=self.target.device)[None]
                    features = self.target.features(token, torch.zeros_like(token), head.feature_layers)
                    texts.append((features, text.start))
            self.texts = texts
        depths = min(self.tree.deepest, head.max_depth)
        hits, rows = torch.zeros(depths), torch.zeros(depths)
        for features, start in self.texts:
            if halted():
                return None
            token, rank = features.token[0, start - 1 :], []
            for d, draft in enumerate(unrolled(head, features, depths), 1):
                logits = scatter_logits(head.vocab, head.compute_logits(draft.state[0, start - 1 :], d))
                rank.append(ranks(logits, token, d).cpu())
            hits += (torch.stack(rank) == 0).cumprod(0).sum(1)
            rows += (torch.stack(rank) >= 0).sum(1)
        return (hits / rows.clamp_min(1)).tolist()
