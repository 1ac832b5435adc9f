"""A toy target on disk, heads that are trained on its answers in seconds, and their export, for the doctor."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jaxtyping
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from data.text.files import content_hash
from data.text.template import template_sha256
from eval.inputs.workloads import Text, write
from eval.measures import metrics
from heads import HEADS
from heads.common.typed import typed
from heads.formats.published.export import TargetFacts, export
from heads.formats.store import save_head
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY
from ops.doctor import DoctorConfig, examine
from ops.examine import WRONG, Finding
from tests import toys
from tests.eval.stubs import ROW
from train.release.config import TEMPLATE

LAYERS, TOKENS, PROMPTS, DEPTHS = 8, 32, 3, 3
CONTEXT = 4096  # more than the 2048 that a silent config.json stands for
IDS = "eagle_aux_hidden_state_layer_ids"
FULL = {"draft_vocab": None, "lm_head": "shared"}  # a head that drafts all tokens, by the target's lm_head
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {"layers": 1, "bias": False},
    "eagle3": {"feature_layers": None, "draft_vocab": 30},
    "eagle4": {"candidates": 9},
    "peagle": {"feature_layers": None, "draft_vocab": 30, "layers": 1, "depths": 3},
    "medusa": {"heads": 3},
    "hydra": {"heads": 3, "layers": 1, "prefix": False},
    "block": {"depths": 3, "layers": 1, "feature_layers": [1, 3, 5], "mask_token": 7},
    "mtp": {},
}
TREE = {"kind": "chain", "depth": 3, "top_k": 0, "nodes": 0, "paths": [], "widths": []}


def make_target(folder: Path) -> Target:
    """Write a toy target with a tokenizer, and load it."""
    torch.manual_seed(1)
    sizes = toys.SIZES | {"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]))
    model.save_pretrained(folder)
    tokenizer: Any = toys.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), "float32", "cpu")


def prompts(folder: Path) -> Path:
    """Write the prompts to measure on, as tokens."""
    rows = [{"id": str(i), "token": toys.prompt(i), "category": "", "text": "", "system": ""} for i in range(PROMPTS)]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def answers(target: Target) -> list[Text]:
    return write(target, [toys.prompt(i) for i in range(PROMPTS)], RequestParams(TOKENS, GREEDY))


def made(kind: str, target: Target, **options: Any) -> Any:
    torch.manual_seed(5)
    config = {"name": kind, **toys.HEAD_CONFIGS[kind], **OPTIONS[kind], **options}
    config |= {"length": None} if "length" in config else {}
    return HEADS[kind](HEADS[kind].Config(**config), target.embeddings)


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave out the checks of shapes, which are most of the time that a toy's training and decoding take."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def train(head: Any, target: Target, texts: list[Text], steps: int = 80) -> Any:
    """Train a head on the target's answers until it drafts most of them."""
    token = torch.tensor([text.token for text in texts])
    with torch.no_grad():
        features = target.features(token, torch.zeros_like(token), head.feature_layers)
    if head.vocab is not None:
        head.vocab.choose(token.flatten().bincount(minlength=toys.VOCAB))
    parameters = [each for name, each in head.named_parameters() if name != "mask"]
    optimizer = torch.optim.Adam(parameters, 0.015)
    depths = head.max_depth if head.max_depth <= 16 else DEPTHS
    with unchecked():
        for _ in range(steps):
            optimizer.zero_grad()
            losses = []
            for depth, draft in enumerate(head.unroll(features, depths), 1):
                label, logits = (
                    token[:, depth + 1 :].contiguous(),
                    head.compute_logits(draft.state[:, : -depth - 1], depth),
                )
                place = label if head.vocab is None else head.vocab.index_of(label)
                losses.append(functional.cross_entropy(logits.flatten(0, 1), place.flatten(), ignore_index=-1))
            sum(losses, torch.zeros(())).backward()
            optimizer.step()
    return head.requires_grad_(False)


def published(kind: str, form: str | None, head: Any, target: Target, folder: Path) -> Path:
    """Write a head as publishing does, with what its training recorded, in a form or in our own."""
    path = Path(target.name)
    if form is None:
        save_head(folder, head, target.spec, TREE)
    else:
        said = target.config.to_dict()
        export(head, form, TargetFacts("me/target", said, torch.float32, 3), folder)
    tokenizer: Any = target.tokenizer
    reference = {"tokenizer_sha256": content_hash(path / "tokenizer.json"), TEMPLATE: template_sha256(tokenizer)}
    (folder / "tokenizer_reference.json").write_text(json.dumps(reference))
    made = speculate(
        target, HeadDrafter(head, typed(TreeConfig, TREE), kind), [toys.prompt(i) for i in range(PROMPTS)],
        RequestParams(TOKENS, GREEDY),
    )  # fmt: skip
    tau = metrics.acceptance(made).tau or 1.0
    row = replace(ROW, drafter=kind, tree="chain-3", workload="prompts.jsonl", tau=tau, tau_ci=(tau - 0.1, tau + 0.1))
    report = {
        "schema": 1, "target": asdict(target.spec), "device": {}, "settings": {"max_new_tokens": TOKENS},
        "rows": [asdict(row)],
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def change(folder: Path, **edits: Callable[[dict[str, Any]], object]) -> None:
    """Plant a fault: edit `config`, `tensors`, `report` or `reference` of a head's folder."""
    files = {
        "config": "config.json",
        "report": "report.json",
        "reference": "tokenizer_reference.json",
        "run": "config.yaml",
    }
    for name, edit in edits.items():
        if name == "tensors":
            held: dict[str, Any] = load_file(folder / "model.safetensors")
            edit(held)
            save_file({key: tensor.contiguous() for key, tensor in held.items()}, folder / "model.safetensors")
        else:
            said = json.loads((folder / files[name]).read_text()) if (folder / files[name]).is_file() else {}
            edit(said)
            (folder / files[name]).write_text(json.dumps(said))


def asked(folder: Path, target: Target, measure: bool, form: str | None = None, sibling: bool = False) -> DoctorConfig:
    workload = str(Path(target.name) / "prompts.jsonl")
    return DoctorConfig(str(folder), target.name, form, sibling, measure, workload, PROMPTS, TOKENS, 3, "float32")


def faults(folder: Path, target: Target, measure: bool = False, form: str | None = None) -> list[Finding]:
    return [found for found in examine(asked(folder, target, measure, form)) if found.verdict == WRONG]


class Ward:
    """A target with its answers, and heads that are trained once for all tests."""

    def __init__(self, folder: Path) -> None:
        self.target: Target = make_target(folder)
        prompts(folder)
        self.texts = answers(self.target)
        self.heads: dict[str, Any] = {}

    def head(self, kind: str, options: dict[str, Any], steps: int = 80) -> Any:
        name = f"{kind} {options} {steps}"
        if name not in self.heads:
            head = made(kind, self.target, **options)
            if "mask" in head.state_dict():
                head.state_dict()["mask"].copy_(self.target.embeddings.embed(torch.tensor(7)))
            self.heads[name] = train(head, self.target, self.texts, steps)
        return self.heads[name]

    def published(self, folder: Path, kind: str, form: str | None, options: dict[str, Any], steps: int = 80) -> Path:
        kept = Path(self.target.name) / "published" / f"{kind} {form} {sorted(options)} {steps}"
        if not kept.is_dir():
            published(kind, form, self.head(kind, options, steps), self.target, kept)
        return Path(shutil.copytree(kept, folder))


def set_to(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda held: held.update(values)


def without(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda held: [held.pop(name) for name in names]


def within(part: str, **values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda held: held[part].update(values)


def rope(**values: Any) -> Callable[[dict[str, Any]], object]:
    """Set keys wherever the decoder layer's numbers stand."""
    return lambda held: [part.update(values) for part in (held, held["transformer_layer_config"])]


def turned(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], object]:
    return lambda held: held.update({name: change(held[name])})


def prefixed(held: dict[str, Any]) -> None:
    for name in list(held):
        held[f"model.{name}"] = held.pop(name)
