"""Speculative streams: the target stays as it is, and a stream's law is the same in training, decoding and by hand."""

import copy
import functools
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heads.common.target_config import cache_argument
from heads.common.typed import build
from heads.formats.store import TargetSpec, read_tensors, write_folder
from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters.contrib.streams import KIND, Streams, StreamsDrafter
from inference.drafters.policy import TreeConfig
from inference.protocol import CommittedTokens, DraftContext, Proposal
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree, LookAhead
from tests import toys
from tests.inference.model_free import Recorder, accepted
from tests.oracle import score

TOKENS = 36
CONFIG = Streams.Config(streams=3, layers=2, rank=4, alpha=8, modules=None)
EXACT = {"gemma2": 1e-5}  # its attention takes the softmax in fp32 whatever the model's dtype
DOUBLE = torch.float64
LAYERS = [*((name, 2) for name in toys.ARCHITECTURES), ("llama", None), ("gpt2", None)]


def made(target: Target, config: Streams.Config = CONFIG) -> Streams:
    """Return streams whose weights are large enough that they draft varied tokens."""
    torch.manual_seed(3)
    streams = Streams(config, target)
    for parameter in streams.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return streams.to(target.device, target.dtype).eval().requires_grad_(False)


@functools.cache
def toy(name: str = "llama", dtype: torch.dtype = torch.float32, layers: int | None = 2) -> tuple[Target, Streams]:
    """Return a toy target and its streams, the same every time."""
    target = toys.target(name, dtype)
    return target, made(target, replace(CONFIG, layers=layers))


def source(tree: TreeConfig, dtype: torch.dtype = torch.float32) -> Any:
    target, streams = toy(dtype=dtype)
    return StreamsDrafter(StreamsDrafter.Config("nowhere", tree), target, "streams", streams)


def text(seed: int) -> tuple[list[int], int]:
    """Return a prompt with the target's greedy continuation, and the prompt's length."""
    prompt = toys.prompt(seed)
    return prompt + autoregress(toys.target(dtype=DOUBLE), prompt, RequestParams(TOKENS, GREEDY)).tokens, len(prompt)


@pytest.mark.parametrize(("name", "layers"), LAYERS)
def test_nodes_do_not_notice_their_streams(name: str, layers: int | None) -> None:
    (target, streams), near = toy(name, DOUBLE, layers), EXACT.get(name, 1e-9)
    tree = DraftTree(torch.tensor(toys.prompt(9, 4)), torch.tensor([-1, 0, 0, 2]))
    visible = trees.ancestors(tree)[None]
    rows, offset, seen, stack = streams.stream_rows(torch.arange(4)[None], visible.sum(-1) - 1, visible)
    look_ahead = LookAhead(tree.token[rows[0]], offset[0], seen[0], stack)
    prompt = torch.tensor(toys.prompt(3, 12))
    found = []
    for ride in (None, look_ahead, look_ahead._replace(stack=None)):
        cache = target.cache()
        target.prefill(prompt, cache, layers=(0,))
        found.append(score(target, tree, cache, ride, layers=(0,)).logits)
    alone, together, unadapted = (logits[0] for logits in found if logits is not None)
    torch.testing.assert_close(together[:4], alone, rtol=near, atol=near)
    assert not torch.allclose(together[4:], unadapted[4:], atol=0.1), "the adapters did nothing: nothing was tested"


def by_hand(target: Target, streams: Streams, token: list[int]) -> Tensor:
    """Return the laws of the last token's streams, one after another, through merged weights and a plain cache."""
    first = len(target.decoder_layers) - len(streams.top)
    base: Any = copy.deepcopy(target.base)
    out = target.base(torch.tensor([token]), use_cache=True, output_hidden_states=True)
    scale = streams.config.alpha / streams.config.rank
    for name, matrices in streams.adapters.items():
        weight = base.get_submodule(name.replace("/", ".")).weight
        weight.data += scale * matrices.up.weight @ matrices.down.weight
    cache, laws = out[cache_argument(base)], []
    for j in range(1, streams.config.streams + 1):
        hidden = out.hidden_states[first][:, -1:] + streams.embedding[j - 1]
        position = torch.tensor([[len(token) - 1 + j]])
        angles = base.rotary_emb(hidden, position)
        for layer in base.layers[first:]:
            hidden = layer(hidden, position_ids=position, position_embeddings=angles, **{cache_argument(layer): cache})
        for layer in cache.layers[:first]:  # the lower layers hold no streams
            layer.keys, layer.values = layer.keys[:, :, : len(token)], layer.values[:, :, : len(token)]
        laws.append(target.embeddings.logits(base.norm(hidden))[0, 0])
    return torch.stack(laws)


@torch.no_grad()
@pytest.mark.parametrize(("name", "layers"), [("llama", 1), ("llama", None), ("qwen3", 2)])
def test_the_law_of_a_stream_is_the_one_computed_by_hand(name: str, layers: int | None) -> None:
    target, streams = toy(name, DOUBLE, layers)
    token = toys.prompt(4, 10)
    anchor = torch.tensor([[3, 9]])
    found, _ = streams(torch.tensor([token]), torch.zeros(1, 10, dtype=torch.long), anchor)
    for i, row in enumerate(anchor[0].tolist()):
        torch.testing.assert_close(found[0, i], by_hand(target, streams, token[: row + 1]), rtol=1e-6, atol=1e-6)


Seen = list[tuple[int, Proposal, int, CommittedTokens]]


def watched(target: Target, streams: Streams, seed: int) -> tuple[Seen, Generation]:
    """Return each pass's root, what it proposed, its room, and what became of it."""
    config = StreamsDrafter.Config("", toys.TREES["dynamic"])
    drafter = Recorder(StreamsDrafter(config, target, "streams", streams))
    run = speculate(target, drafter, toys.prompt(seed), RequestParams(TOKENS, GREEDY))
    commits = [commit for commit in drafter.commits if commit.verified is not None]
    passes = zip(drafter.asked, drafter.proposed, commits, strict=False)  # the last pass is not reported
    return [(len(text) - 1, proposal, room, commit) for (text, room), proposal, commit in passes], run


@pytest.mark.parametrize(("name", "layers"), LAYERS)
def test_the_law_in_training_is_the_law_in_decoding(name: str, layers: int | None) -> None:
    """Every accepted node's streams, in the pass that verified it, against one pass over the finished text."""
    (target, streams), near = toy(name, DOUBLE, layers), EXACT.get(name, 1e-9) * 10
    seen, run = watched(target, streams, 0)
    token = torch.tensor([toys.prompt(0) + run.tokens])
    # A second document in front: training packs rows, decoding does not.
    packed = torch.cat([torch.tensor([toys.prompt(7, 9)]), token], 1)
    document = torch.cat([torch.zeros(1, 9, dtype=torch.long), torch.ones_like(token)], 1)
    anchor = torch.arange(packed.shape[1])[None]
    with torch.no_grad():
        laws, teacher = streams(packed, document, anchor)
        own = target.embeddings.logits(target.features(packed, document, ()).last_hidden)
    compared = 0
    for root, proposal, room, commit in seen:
        verified, look_ahead = commit.verified, proposal.look_ahead
        if verified is None or verified.look_ahead is None or look_ahead is None:
            continue
        size = len(proposal.tree.token)
        for depth, node in enumerate(verified.path):
            mine = (look_ahead.attn_mask[:, :size] == trees.ancestors(proposal.tree)[node]).all(-1)
            mine &= look_ahead.offset < room  # the others run at the last position, and are never read
            expected = laws[0, 9 + root + depth][: int(mine.sum())]
            torch.testing.assert_close(verified.look_ahead[mine], expected, rtol=near, atol=near)
            compared += int(mine.sum())
    assert compared > 60
    for depth in (1, 2, 3):
        torch.testing.assert_close(teacher[0, :-depth, depth - 1], own[0, depth:], rtol=near, atol=near)


def test_every_tree_and_its_acceptance_follow_from_the_finished_text() -> None:
    """The streams of the row that ended a step make the next tree, whatever was accepted in between."""
    (target, streams), total = toy(dtype=DOUBLE), 0
    state = source(toys.TREES["dynamic"], DOUBLE).start([1])
    for seed in range(2):
        token, length = text(seed)
        seen, run = watched(target, streams, seed)
        assert run.tokens == token[length:]
        with torch.no_grad():
            document = torch.zeros(1, len(token), dtype=torch.long)
            laws = streams(torch.tensor([token]), document, torch.arange(len(token))[None])[0][0]
        proposed = {root: proposal.tree for root, proposal, _, _ in seen}
        counts, root, end = [0], length + 1, len(token)  # the first step drafts nothing
        while root < end - 1:
            max_draft_depth = end - root - 2
            context = DraftContext(token[: root + 1], GREEDY, RequestRng(0, 0, coupled=False), max_draft_depth)
            state.logits = laws[root - 1]
            tree = state.propose(context).tree
            assert root not in proposed or all(a.equal(b) for a, b in zip(tree, proposed[root], strict=True))
            counts.append(trees.agreed(tree, token[root + 1 :]))
            root += counts[-1] + 1
        assert counts == accepted(run)
        total += sum(counts)
    assert total > 0, "no draft was accepted: nothing was tested"


def test_nothing_lies_deeper_than_can_be_committed() -> None:
    target, streams = toy()
    seen, run = watched(target, streams, 2)
    assert len(run.tokens) == TOKENS
    for _, proposal, room, _ in seen:
        assert int(trees.layout(proposal.tree, 0)[0].max()) <= room
    filled = toys.prompt(0, target.max_model_len - 5)
    assert len(speculate(target, source(toys.TREES["dynamic"]), filled, RequestParams(TOKENS, GREEDY)).tokens) == 5


def test_the_gradient_reaches_the_streams_alone() -> None:
    target = toys.target(dtype=DOUBLE)
    streams = made(target).train().requires_grad_(True)
    document = torch.zeros(1, 12, dtype=torch.long)
    draft, teacher = streams(torch.tensor([toys.prompt(0, 12)]), document, torch.tensor([[2, 5, 8]]))
    assert not teacher.requires_grad
    draft.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in streams.parameters())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert {id(p) for p in streams.parameters()}.isdisjoint(map(id, target.model.parameters()))


def save(run: Path, config: Streams.Config, weights: dict[str, Tensor], spec: TargetSpec) -> None:
    write_folder(run / KIND, {KIND: asdict(config), "target": asdict(spec)}, weights)


def load(run: Path) -> Streams:
    return StreamsDrafter(StreamsDrafter.Config(str(run), toys.TREES["chain"]), toy()[0], "streams").streams


def test_round_trip_bit_for_bit(tmp_path: Path) -> None:
    target, streams = toy()
    save(tmp_path, CONFIG, streams.state_dict(), target.spec)
    loaded = load(tmp_path)
    assert loaded.config == CONFIG
    assert all(tensor.equal(loaded.state_dict()[name]) for name, tensor in streams.state_dict().items())
    assert sum(t.numel() for t in read_tensors(tmp_path / KIND).values()) == sum(p.numel() for p in loaded.parameters())


def test_another_targets_streams_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    target, streams = toy()
    weights, folder = streams.state_dict(), tmp_path / KIND

    def refused(words: str) -> None:
        with pytest.raises(ValueError, match=words):
            load(tmp_path)

    save(tmp_path, CONFIG, weights, replace(target.spec, name="someone/target", fingerprint="f00d"))
    refused("someone/target: its fingerprint of the weights is f00d")
    save(tmp_path, replace(CONFIG, rank=2), weights, target.spec)
    refused(r"down.weight is \(4, .* its config.json and the target make it \(2, ")
    save(tmp_path, CONFIG, {"embedding": weights["embedding"]}, target.spec)
    refused("missing")
    (folder / "config.json").write_text('{"format": 1, "streams": {}}')
    refused("kind streams, whose keys are format, streams and target")
    (folder / "config.json").unlink()
    refused("not a folder of kind streams")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"streams": 0}, "streams.streams is 0"),
        ({"layers": 0}, "streams.layers is 0"),
        ({"rank": 0}, "streams.rank is 0"),
        ({"alpha": 0}, "streams.alpha is 0"),
        ({"modules": ["w_proj"]}, "streams.modules is .'w_proj'.: llama has no such linear layer"),
    ],
)
def test_a_bad_configuration_is_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Streams(build(Streams.Config, asdict(CONFIG) | change, "streams"), toys.target())


def test_a_target_that_takes_no_mask_and_layers_of_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toys.target(), "takes_trees", False)
    with pytest.raises(ValueError, match="no stream can ride along"):
        Streams(CONFIG, toys.target())
    target, streams = toy()
    one, linear = torch.zeros(1, 1, dtype=torch.long), nn.Linear(4, 4)
    *_, run = streams.stream_rows(one, one, torch.ones(1, 1, 1, dtype=torch.bool))
    monkeypatch.setattr(target, "base", lambda **_: linear(torch.zeros(3, 4)))
    monkeypatch.setattr(streams, "linears", {next(iter(streams.linears)): linear})
    with pytest.raises(ValueError, match=r"streams.modules.*attention"):
        run()
