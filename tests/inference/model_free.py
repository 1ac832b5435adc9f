"""What the tests of the model-free sources share: their YAML, and a decoding whose proposals are written down."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters import registry
from inference.drafters.host import DrafterState, HostDrafter
from inference.protocol import CommittedTokens, DraftContext, Drafter, Proposal
from inference.target.target import Target
from inference.verification.sample import GREEDY

CONF = Path(__file__).parents[2] / "conf" / "drafter"
NAMES = (
    *("prompt_lookup", "prompt_lookup_hf", "prompt_lookup_vllm", "suffix", "suffix_cold"),
    *("recycling", "recycling80", "lookahead"),
)


def make(name: str, target: Target, **values: Any) -> Any:
    """Return a source as its YAML describes it, but for the values given."""
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(config, dict)
    return registry.make(name, {**config, **values}, target)


class Recorder(HostDrafter, DrafterState):
    """SpecDecodingStats everything on to a source and keeps what it was asked and what it proposed."""

    def __init__(self, source: HostDrafter) -> None:
        self.source, self.name, self.tree = source, source.name, source.tree
        self.reads_logits, self.single = source.reads_logits, source.single
        self.asked: list[tuple[list[int], int]] = []
        self.proposed: list[Proposal] = []
        self.commits: list[CommittedTokens] = []

    def start(self, prompt: list[int]) -> "Recorder":
        self.state = self.source.start(prompt)
        return self

    def reset(self) -> None:
        self.source.reset()

    def update(self, commit: CommittedTokens) -> None:
        self.commits.append(commit)
        self.state.update(commit)

    def propose(self, context: DraftContext) -> Proposal:
        before = list(context.token)
        self.asked.append((before, context.max_draft_depth))
        self.proposed.append(self.state.propose(context))
        assert context.token == before, "a proposal must leave the engine's text alone"
        return self.proposed[-1]


def plain(target: Target, prompt: list[int], tokens: int) -> list[int]:
    """Return the target's own greedy continuation."""
    return autoregress(target, prompt, RequestParams(tokens, GREEDY)).tokens


def logits(target: Target, text: list[int]) -> Tensor:
    """Return the logits after a text, by a pass over it alone."""
    out = target.prefill(torch.tensor(text), target.cache()).logits
    return out[0, -1]


def decode(target: Target, source: Drafter, prompt: list[int], tokens: int) -> Generation:
    """Decode greedily with a source."""
    return speculate(target, source, prompt, RequestParams(tokens, GREEDY))


def accepted(made: Generation) -> list[int]:
    """Return how many drafted tokens each pass accepted."""
    return [step.accepted for step in made.steps]
