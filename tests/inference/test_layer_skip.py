"""Self-speculation by skipped sub-layers: the draft is the naive one, its rows are dropped, and the file is checked."""

import copy
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers.cache_utils import DynamicCache

from heads.common.resolvers import ROOT
from heads.common.target_config import cache_argument
from heads.common.typed import build, typed
from inference.decode import Generation, Settings, autoregress, speculate
from inference.drafters.contrib.layer_skip import FORMAT, LayerSkip, SkipFile, save_skips
from inference.protocol import Context, Proposal
from inference.target.stack import Skips
from inference.target.target import Target
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY, Sampling, distribution
from tests import toys

TOKENS = 24
SKIPS = Skips((0, 2), (1,))  # the first layer's attention too: transformers reads the cache's length from that layer
EASY = Skips((), (1,))  # accepted now and then
EXACT = {"gemma2": 1e-5}  # its attention takes the softmax in fp32 whatever the model's dtype


def drafter(folder: Path, target: Target, skips: Skips, depth: int = 4, stop: float = 0.0) -> LayerSkip:
    path = folder / "skips.json"
    save_skips(path, SkipFile(FORMAT, target.spec, list(skips.attention), list(skips.mlp), depth, stop, {}))
    return LayerSkip(LayerSkip.Config(str(path), None, None), target, "layer skip")


def thinned(target: Target, skips: Skips) -> torch.nn.Module:
    """Copy the model and silence the skipped sub-layers by zeroing what they write."""
    model = copy.deepcopy(target.model)
    layers = Target(model, target.tokenizer, target.name).decoder_layers
    for names, chosen in ((("self_attn", "attn"), skips.attention), (("mlp",), skips.mlp)):
        for i in chosen:
            module = next(child for name, child in layers[i].named_children() if name in names)
            last = next(m for n, m in module.named_modules() if n in ("o_proj", "down_proj", "c_proj"))
            for parameter in last.parameters():
                parameter.data.zero_()
    return model


class Naive:
    """The draft by transformers' own means: the full model's cache of the text, then the silenced copy on top."""

    def __init__(self, target: Target, skips: Skips) -> None:
        self.full, self.thin = target.model, thinned(target, skips)

    def logits(self, text: list[int], drafted: list[int]) -> Tensor:
        cache = DynamicCache()
        self.full(input_ids=torch.tensor([text[:-1]]), use_cache=True, **{cache_argument(self.full): cache})
        for token in [text[-1], *drafted]:
            out = self.thin(input_ids=torch.tensor([[token]]), use_cache=True, **{cache_argument(self.full): cache})
        return out.logits[0, -1]

    def chain(self, text: list[int], depth: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < depth:
            drafted.append(int(self.logits(text, drafted).argmax()))
        return drafted


def propose(source: LayerSkip, target: Target, sampling: Sampling = GREEDY, room: int = 9) -> Proposal:
    text, cache = toys.prompt(3, 12), target.cache()
    target.prefill(torch.tensor(text[:-1]), cache)
    made = source.propose(Context(text, sampling, Generator(0, target.device), room, cache))
    assert {layer.get_seq_length() for layer in cache.hf.layers} == {11}, "the draft's rows are dropped"
    return made


@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_the_draft_is_the_naive_one_and_q_its_law(tmp_path: Path, name: str) -> None:
    target, sampling = toys.target(name, torch.float64), Sampling(0.9, 15, 0.95)
    naive, near = Naive(target, SKIPS), EXACT.get(name, 1e-9)
    source = drafter(tmp_path, target, SKIPS)
    text = toys.prompt(3, 12)
    assert propose(source, target).tree.token.tolist() == [text[-1], *naive.chain(text, 4)]
    made = propose(source, target, sampling)
    assert made.q is not None
    drawn = made.tree.token[1:].tolist()
    assert len(drawn) == 4
    for i in range(4):
        law = distribution(naive.logits(text, drawn[:i]), sampling)
        assert law[drawn[i]] > 0
        torch.testing.assert_close(made.q[i], law.to(made.q), rtol=near, atol=near)


def test_the_draft_leaves_the_next_pass_as_it_was(tmp_path: Path) -> None:
    target = toys.target("mistral", torch.float64)
    text, cache, fresh = toys.prompt(3, 12), target.cache(), target.cache()
    for each in (cache, fresh):
        target.prefill(torch.tensor(text[:-1]), each)
    source = drafter(tmp_path, target, SKIPS)
    made = source.propose(Context(text, GREEDY, Generator(0, target.device), 9, cache))
    torch.testing.assert_close(target.score(made.tree, cache).logits, target.score(made.tree, fresh).logits)


def decode(folder: Path, name: str, skips: Skips, seed: int, sampling: Sampling = GREEDY) -> Generation:
    target = toys.target(name)
    return speculate(target, drafter(folder, target, skips), toys.prompt(seed), Settings(TOKENS, sampling, seed=5))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_speculation_equals_plain_decoding(tmp_path: Path, name: str) -> None:
    accepted = 0
    for seed in range(2):
        plain = autoregress(toys.target(name), toys.prompt(seed), Settings(TOKENS, GREEDY)).tokens
        made = decode(tmp_path, name, EASY, seed)
        assert toys.lively(plain)
        assert made.tokens == plain
        accepted += sum(step.accepted for step in made.steps)
    assert accepted > 0, "no draft was accepted: nothing was tested"


def test_acceptance_is_what_the_recorded_text_predicts(tmp_path: Path) -> None:
    target, total = toys.target(), 0
    naive = Naive(target, EASY)
    for seed in range(2):
        prompt = toys.prompt(seed)
        text = prompt + autoregress(target, prompt, Settings(TOKENS, GREEDY)).tokens
        counts, root = [], len(prompt)
        while root < len(text) - 1:
            drafted = naive.chain(text[: root + 1], min(4, len(text) - 2 - root))
            agreed = 0
            while agreed < len(drafted) and drafted[agreed] == text[root + 1 + agreed]:
                agreed += 1
            counts.append(agreed)
            root += agreed + 1
        assert [step.accepted for step in decode(tmp_path, "llama", EASY, seed).steps] == counts
        total += sum(counts)
    assert total > 0


def test_sampling_is_reproducible_and_varied(tmp_path: Path) -> None:
    first, again = (decode(tmp_path, "llama", EASY, 0, Sampling(1.0, 10, 0.95)) for _ in range(2))
    assert first.tokens == again.tokens
    assert toys.lively(first.tokens)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)])
def test_a_draft_ends_after_its_first_unsure_token(tmp_path: Path, sampling: Sampling) -> None:
    target = toys.target("llama", torch.float64)
    whole = propose(drafter(tmp_path, target, EASY, depth=8), target, sampling).tree.token.tolist()
    naive, text = Naive(target, EASY), toys.prompt(3, 12)
    sure = [float(naive.logits(text, whole[1:i]).softmax(-1)[whole[i]]) for i in range(1, 9)]
    stop = sorted(sure)[2] + 1e-6  # three of the tokens fall below it
    short = propose(drafter(tmp_path, target, EASY, depth=8, stop=stop), target, sampling).tree.token.tolist()
    length = next(i for i in range(8) if sure[i] < stop) + 1
    assert short == whole[: length + 1]
    own = LayerSkip(LayerSkip.Config(str(tmp_path / "skips.json"), 7, 0.0), target, "own numbers")
    assert propose(own, target, sampling).tree.token.tolist() == whole[:8]


def test_no_proposal_is_deeper_than_the_room(tmp_path: Path) -> None:
    target = toys.target()
    for room in (0, 2):
        made = propose(drafter(tmp_path, target, EASY), target, room=room)
        assert len(made.tree.token) == room + 1


def test_a_file_of_another_target_is_refused_by_name(tmp_path: Path) -> None:
    source = drafter(tmp_path, toys.target(), EASY)
    with pytest.raises(ValueError, match="another target, llama, not of gpt2") as error:
        LayerSkip(LayerSkip.Config(str(tmp_path / "skips.json"), None, None), toys.target("gpt2"), source.name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("{", "damaged"),
        ("[]", "not a file of skipped sub-layers"),
        ('{"format": 1}', "missing"),
        ("format", "not a file of skipped sub-layers"),
        ("layer", "skips layer 3"),
        ("below", "skips layer -1"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    path, target = tmp_path / "skips.json", toys.target()
    drafter(tmp_path, target, EASY)
    kept = json.loads(path.read_text())
    changed = {"format": {"format": 7}, "layer": {"mlp": [3]}, "below": {"attention": [-1]}}
    path.unlink()
    if content is not None:
        path.write_text(json.dumps(kept | changed[content]) if content in changed else content)
    with pytest.raises(ValueError, match=said) as error:
        LayerSkip(LayerSkip.Config(str(path), None, None), target, "layer skip")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_target_that_takes_no_mask_is_refused(tmp_path: Path) -> None:
    target = toys.target("qwen3")
    target.takes_trees = False
    vars(target).pop("parts", None)
    try:
        with pytest.raises(ValueError, match="takes no mask of ours"):
            drafter(tmp_path, target, EASY)
    finally:
        target.takes_trees = True


@pytest.mark.parametrize(
    ("values", "said"), [((None, 4, 0.0), "skips is missing"), (("x", 0, 0.0), "depth"), (("x", 4, 1.0), "stop")]
)
def test_a_bad_value_is_named(values: tuple[str | None, int, float], said: str) -> None:
    with pytest.raises(ValueError, match=rf"drafter\.layer_skip\.{said}"):
        build(LayerSkip.Config, dict(zip(("skips", "depth", "stop"), values, strict=True)), "drafter.layer_skip")


def test_the_yaml_fits() -> None:
    values = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "drafter" / "layer_skip.yaml"))
    assert isinstance(values, dict)
    assert typed(LayerSkip.Config, values | {"skips": "x"}).depth is None
