"""vLLM on this CPU serves heads of ours: its text stays what it is without them, and it accepts what our verifier does.

vLLM counts what it accepts of a draft behind the end of an answer, which is no part of it. Our verifier is therefore
run past each end, and its passes are counted up to the one that reaches it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eval.inputs.workloads import load_workload
from heads.block import Block
from heads.formats.hub import load_found, resolve_head
from heads.formats.published import mimo
from heads.formats.store import save_head
from heads.mtp import Mtp
from inference.decode import Step
from inference.drafters.head import HeadDrafter
from inference.target.target import Target
from tests import families, toys
from tests.serving import test_checkpoint as toy
from tests.serving.conftest import command
from tests.serving.engines import TARGET, asked
from tests.serving.test_llama import chain
from train.start import from_target, match_target

pytestmark = pytest.mark.serving
TOKENS = 96
TOKENS_DRAFTED = {"eagle": 3, "eagle3": 4, "medusa": 4, "mtp": 3, "dflash": 6, "peagle": 4}
METHODS: dict[str, dict[str, Any]] = {"peagle": {"method": "eagle3", "parallel_drafting": True}}  # as the card says
OVERRIDES = {"mtp": {"num_nextn_predict_layers": 1}}  # of the target's config.json


@pytest.fixture(scope="module")
def target() -> Target:
    loaded = Target.load(str(TARGET), "float32", "cpu")
    loaded.eos = frozenset()  # see above
    return loaded


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return [prompt.token for prompt in load_workload(str(TARGET / "prompts.jsonl"), target, 16)]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """Return transformers' answers, which are vLLM's own: test_endpoint.py compares its server with one without."""
    return [families.generated(target, prompt, TOKENS) for prompt in prompts]


@pytest.fixture(scope="module", params=TOKENS_DRAFTED)
def published(
    request: pytest.FixtureRequest, run_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Return a kind of head and its folder, written as it would be published for vLLM."""
    kind = request.param
    out = tmp_path_factory.mktemp("served") / f"tiny-{kind}"
    said = [f"run={run_of(kind)}", f"repo=me/tiny-{kind}", "format=vllm", "dtype=float32", "dry_run=true", f"out={out}"]
    command("train/publish.py", *said)
    return kind, out


def first_norm(head: Block, *rows: Any) -> Any:
    """Return a block's context as vLLM 0.32 makes it on a CPU: all layers' keys with the first layer's norm.

    See findings/vllm_cpu_dflash_key_norm.sh.
    """
    attention: Any = [layer.self_attn for layer in head.layers]
    own = [one.k_norm for one in attention]
    for one in attention:
        one.k_norm = own[0]
    context = Block.context(head, *rows)
    for one, norm in zip(attention, own, strict=True):
        one.k_norm = norm
    return context


def by_us(target: Target, folder: Path, prompts: list[list[int]], answers: list[list[int]], depth: int) -> list[Step]:
    """Return our passes until each answer is whole, with all that they accept."""
    head: Any = load_found(resolve_head(str(folder)), target.embeddings, target.spec)
    if isinstance(head, Block):
        head.context = partial(first_norm, head)
    return toy.passes(target, HeadDrafter(head.float(), chain(depth), "head"), prompts, answers, depth)


def speculated(target: str, kind: str, folder: Path, depth: int, prompts: list[list[int]]) -> dict[str, Any]:
    said = METHODS.get(kind, {"method": kind}) | {"model": str(folder), "num_speculative_tokens": depth}
    job = {"target": target, "prompts": prompts, "tokens": TOKENS, "speculative": said}
    return asked("serve_vllm.py", job | {"overrides": OVERRIDES.get(kind, {})})


def test_vllm_writes_the_same_text_and_accepts_what_we_accept(
    target: Target, prompts: list[list[int]], plain: list[list[int]], published: tuple[str, Path]
) -> None:
    kind, folder = published
    depth = TOKENS_DRAFTED[kind]
    served = speculated(str(TARGET), kind, folder, depth, prompts)
    assert served["tokens"] == plain
    check_counts(kind, served, by_us(target, folder, prompts, plain, depth))


def check_counts(kind: str, served: dict[str, Any], steps: list[Step]) -> None:
    """Compare vLLM's counters with our passes."""
    ours = 1 + sum(step.accepted for step in steps) / len(steps)
    theirs = 1 + served["accepted_tokens"] / served["drafts"]
    print(f"{kind}: {theirs:.3f} tokens per pass in vLLM, {ours:.3f} in our verifier")
    assert ours > 1.2  # a head that is never accepted would prove nothing
    assert theirs == pytest.approx(ours, rel=0.02)
    assert served["drafts"] == pytest.approx(len(steps), rel=0.02)
    for position, accepted in enumerate(served["accepted_tokens_per_pos"]):
        mine = sum(step.accepted > position for step in steps)
        assert accepted == pytest.approx(mine, abs=0.02 * len(steps))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_vllm_serves_a_qwen3_with_a_head_as_mimos_module(tmp_path: Path, qk_norm: bool) -> None:
    """A toy that has no module of its own; the head knows half of the texts."""
    target, depth = toy.target_of(tmp_path / "target", "Qwen3ForCausalLM"), 2
    plain = [families.generated(target, prompt, toy.TOKENS) for prompt in toy.PROMPTS]
    config = Mtp.Config(name="mtp", **toys.HEAD_CONFIGS["mtp"] | {"qk_norm": qk_norm})
    head: Any = (
        from_target(config, "last_layer", target, "")
        if qk_norm
        else Mtp(match_target(config, target), target.embeddings)
    )
    texts = [prompt + answer for prompt, answer in zip(toy.PROMPTS, plain, strict=True)]
    toy.train(head, target, texts[:4], depth)
    run, folder = tmp_path / "run", tmp_path / "head-mtp"
    save_head(run / "head", head, target.spec, {"kind": "chain", "depth": depth})
    said = [f"run={run}", "repo=me/head-mtp", "format=vllm", "dtype=float32", "dry_run=true", f"out={folder}"]
    command("train/publish.py", *said)
    speculative = {"method": "mtp", "model": str(folder), "num_speculative_tokens": depth}
    job = {"target": str(tmp_path / "target"), "prompts": toy.PROMPTS, "tokens": toy.TOKENS}
    job |= {"speculative": speculative, "overrides": mimo.overrides({"qk_norm": qk_norm})}
    served = asked("serve_vllm.py", job)
    assert served["tokens"] == plain
    check_counts(f"Qwen3, qk_norm={qk_norm}", served, by_us(target, folder, toy.PROMPTS, plain, depth))
