"""Self-speculation by early exit: the naive draft at every node, and the law kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.common.typed import build
from inference.drafters.contrib.layer_skip import FORMAT, EarlyExit, LayerSkip, SkipFile, save_skips
from inference.drafters.host import HostDrafter
from inference.drafters.policy import TreeConfig
from inference.protocol import CommittedTokens, DraftContext, Proposal
from inference.target.model import LayerSkippedTarget, SkipSet
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY, Sampling, distribution
from tests import assistants, toys
from tests.enumeration import EXACT, distance, law, verify_on_device
from tests.inference.test_mirror import mirror
from tests.oracle import by_node, paths

TOKENS = 24
NEAR = {"gemma2": 1e-5}  # its attention takes the softmax in fp32 whatever the model's dtype


def drafter(target: Target, exit_layer: int, tree: str) -> EarlyExit:
    values = {"exit_layer": exit_layer, "tree": toys.TREES[tree]}
    config = build(EarlyExit.Config, values, "drafter.early_exit", {"tree": toys.TREES[tree]})
    return EarlyExit(config, target, "early exit")


def proposal(target: Target, exit_layer: int, tree: str, sampling: Sampling = GREEDY, room: int = 9) -> Proposal:
    """Draft after a prompt, which leaves the cache as it was."""
    prompt = toys.prompt(3, 12)
    cache = target.cache()
    target.prefill(torch.tensor(prompt[:-1]), cache)
    made = drafter(target, exit_layer, tree).propose(
        DraftContext(prompt, sampling, RequestRng(0, 0, coupled=False), room, cache)
    )
    assert {layer.get_seq_length() for layer in cache.hf.layers} == {11}
    assert len(made.tree.token) > 4
    return made


def exit_logits(target: Target, exit_layer: int, path: list[int]) -> Tensor:
    """Read the exit's logits after a text naively: a full pass, its layer's output, the final norm, the lm_head."""
    states = target.model(input_ids=torch.tensor([path]), output_hidden_states=True).hidden_states[exit_layer]
    norm = next(m for n, m in target.base.named_children() if n in ("norm", "ln_f"))
    return target.embeddings.logits(norm(states[0, -1]))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2"])  # sliding windows see tree rows by position
def test_a_tree_is_the_naive_early_exit_draft_at_every_node(name: str) -> None:
    target = toys.target(name, torch.float64)
    made = proposal(target, 2, "static")
    below = trees.children(made.tree)
    for path in paths(made.tree):
        for depth, node in enumerate(path[:-1]):
            text = toys.prompt(3, 12) + made.tree.token[path[1 : depth + 1]].tolist()
            ranked = exit_logits(target, 2, text).topk(len(below[node])).indices.tolist()
            assert made.tree.token[below[node]].tolist() == ranked


def test_q_is_the_law_that_was_drawn_from() -> None:
    target, sampling = toys.target("llama", torch.float64), Sampling(0.8, 12, 0.9)
    made = proposal(target, 1, "sampled", sampling)
    tree, index = trees.keep(made.tree, made.tree.token >= 0)
    nodes = by_node(made.tree, made.q)
    assert nodes is not None
    q = nodes[index]
    for path in paths(tree):
        text = toys.prompt(3, 12) + tree.token[path[1:-1]].tolist()
        law = distribution(exit_logits(target, 1, text), sampling)
        torch.testing.assert_close(q[path[-2]], law, rtol=1e-9, atol=1e-9)


def test_a_layer_is_restored_when_a_pass_fails() -> None:
    target, one = toys.target(), torch.tensor([1])
    thinned = LayerSkippedTarget(target, SkipSet((1, 2), (2,)))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        thinned.run(one + 10_000, one, torch.ones(1, 1).bool(), target.cache())
    assert all("forward" not in vars(module) for module in target.base.modules())


def test_an_exit_out_of_range_is_refused() -> None:
    for exit_layer, said in ((0, "give 1 or more"), (3, "llama's layers give 1 to 2")):
        with pytest.raises(ValueError, match=rf"drafter\.early_exit\.exit_layer is {exit_layer}.*{said}"):
            drafter(toys.target(), exit_layer, "chain")


HORIZON = 3
PROMPT = toys.prompt(3, 6)
SAMPLING = Sampling(1.5, 2, 1.0)  # few tokens to choose from, so that all outcomes can be run


def early_exit(target: Target, folder: Path, tree: str) -> EarlyExit:
    shapes = {"chain": TreeConfig("chain", 2, 0, 0, [], []), "tree": TreeConfig("sampled", 0, 0, 0, [], [2, 1])}
    return EarlyExit(EarlyExit.Config(2, shapes[tree]), target, "early exit")


def layer_skip(target: Target, folder: Path, stop: str) -> LayerSkip:
    file = SkipFile(FORMAT, target.spec, [], [1], 2, float(stop), {})
    save_skips(folder / "skips.json", file)
    return LayerSkip(LayerSkip.Config(str(folder / "skips.json"), None, None), target, "layer skip")


def next_law(target: Target, made: tuple[int, ...]) -> torch.Tensor:
    logits = target.prefill(torch.tensor([*PROMPT, *made]), target.cache()).logits
    assert logits is not None
    return distribution(logits[0, -1], SAMPLING)


def one_pass(target: Target, source: HostDrafter, depths: set[int]) -> dict[tuple[int, ...], float]:
    """Return the law of HORIZON tokens: one drafted and verified pass, then plain sampling."""
    prefix = len(PROMPT) - 1

    def program(rng: Any) -> tuple[int, ...]:
        cache, state = target.cache(), source.start(PROMPT[:-1])
        target.prefill(torch.tensor(PROMPT[:-1]), cache)
        state.update(CommittedTokens(PROMPT[-1:]))
        made = state.propose(DraftContext(PROMPT, SAMPLING, rng, HORIZON - 1, cache))
        logits = target.embeddings.logits(target.score(made.tree, cache).last_hidden[0])
        path, bonus = verify_on_device(made.tree, logits, made.q, SAMPLING, rng)
        cache.keep(prefix, path)
        depths.add(len(path) - 1)
        emitted = [*made.tree.token[path[1:]].tolist(), bonus]
        while len(emitted) < HORIZON:
            emitted.append(rng.sample(next_law(target, tuple(emitted))[None])[0])
        return tuple(emitted[:HORIZON])

    return law(program)


def assistant(target: Target, folder: Path, shape: str) -> HostDrafter:
    path = assistants.save(assistants.noisy(target.model, 0.05), toys.tokenizer(), folder)
    if shape == "mirror":
        return mirror(path, target, 0, tree=assistants.chain(2))
    kind, confidence = ("sampled", 0.0) if shape == "tli" else ("chain", 0.6)
    tree = TreeConfig(kind, 2, 0, 0, [], [2, 1])
    match = "tli" if shape == "tli" else "same"
    return assistants.assistant(path, target, match=match, tree=tree, confidence=confidence, dtype="float64")


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        *((early_exit, shape) for shape in ("chain", "tree")),
        *((layer_skip, shape) for shape in ("0", "0.3")),
        *((assistant, shape) for shape in ("doubting", "tli", "mirror")),
    ],
)
def test_emitted_law_is_the_targets(tmp_path: Path, make: object, shape: str) -> None:
    target = toys.target("llama", torch.float64)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(HORIZON):
        expected = {
            (*path, token): weight * float(after[token])
            for path, weight in expected.items()
            for after in [next_law(target, path)]
            for token in after.nonzero()[:, 0].tolist()
        }
    depths: set[int] = set()
    assert callable(make)
    assert distance(one_pass(target, make(target, tmp_path, shape), depths), expected) < EXACT
    assert {0, 1} <= depths, "drafts were both accepted and rejected"
