"""The trainers of speculators and SpecForge on a CPU: their own models, losses, batching and optimisers, a row a step.

Both give EAGLE-3 heads. What needs an accelerator of theirs is written here as they have it: speculators' loop
(`Trainer.train_epoch`), and for SpecForge its loss kernel's reference form, which stands beside the kernel. They train
the documents of a packed sequence, each with the target's states as an engine hands them out: speculators packs them
again, SpecForge, which does not pack, pads them to the longest. Both drop each document's first token.
"""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.batches import Batch
from heads.base import Features

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = ROOT / ".reference"
INSTALL = (
    "pip install --no-deps --target .reference speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3 openai jiter "
    "pydantic-settings python-dotenv"
)
# speculators' rates are the best of three on the bundled target, SpecForge's the better of two.
RATE, MUON_RATE, SPECFORGE_RATE = 1e-3, 1e-2, 3e-3


class Document(NamedTuple):
    """A document of a packed sequence: tokens, loss mask, the fused layers' states, the last before and after norm."""

    token: Tensor
    mask: Tensor
    hidden: Tensor
    state: Tensor
    last: Tensor


def documents_of(batch: Batch, features: Features) -> list[Document]:
    """Return the documents of a row, whose features hold the output of the target's last layer behind the others."""
    documents = []
    for row in rows_of(batch.document):
        hidden, mask = features.hidden[0, row], batch.loss_mask[0, row].bool()
        states = hidden[:, :-1].flatten(1), hidden[:, -1], features.last_hidden[0, row]
        documents.append(Document(batch.token[0, row], mask, *states))
    return documents


def rows_of(document: Tensor) -> list[Tensor]:
    """Return the mask of each document in a packed sequence, by the document's number at each position."""
    return [document[0] == number for number in range(int(document.max()) + 1)]


def fingerprint(documents: Iterable[tuple[Tensor, Tensor]]) -> str:
    """Return the SHA-256 of documents' tokens and loss masks, but for each one's last mask, which SpecForge clears."""
    digest = hashlib.sha256()
    for token, mask in (document for document in documents if len(document[0])):
        digest.update(len(token).to_bytes(4, "little"))
        digest.update(token.long().numpy().tobytes() + mask[:-1].to(torch.int8).numpy().tobytes())
    return digest.hexdigest()


def available() -> bool:
    """Say whether speculators can be imported, from its folder of the checkout or from the environment."""
    if INSTALLED.is_dir() and str(INSTALLED) not in sys.path:
        sys.path.append(str(INSTALLED))
    return find_spec("speculators") is not None


class Speculators:
    """speculators' EAGLE-3.1 head in training: its defaults but for a norm of each layer's features (`fc_norm`).

    By default it norms all of them as one vector (`norm_before_fc`); on the bundled target both draft alike.
    """

    name, depths = "speculators", 3  # as they come

    def __init__(self, target: Path, depths: int, steps: int, seed: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        if not available():
            raise ValueError(f"speculators is missing: {INSTALL}")
        from loguru import logger
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.train.cli import create_transformer_layer_config
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
        from transformers import get_linear_schedule_with_warmup

        logger.disable("speculators")
        torch.manual_seed(seed)
        layer = create_transformer_layer_config(str(target), 1, "llama", None, 2048, full_attention_indices=[0])
        with warnings.catch_warnings(action="ignore"):  # the default layers are meant
            self.model: Any = Eagle3DraftModel.from_training_args(
                layer, verifier_name_or_path=str(target), draft_vocab_size=layer.vocab_size, norm_before_residual=True,
                fc_norm=True, norm_output=True, ttt_steps=depths, draft_attn_impl="sdpa",
            )  # fmt: skip
        self.lm_head = self.model.lm_head
        self.call, _ = self.model.get_trainer_kwargs(
            loss_fn="kl_div", loss_implementation="eager", ttt_steps=depths, ttt_step_loss_decay=1.0
        )
        config = TrainerConfig(RATE, 1, "", optimizer="muon", muon_lr=MUON_RATE, max_steps=steps)
        self.optimizers = build_optimizers(self.model, config)
        schedule = _resolve_scheduler_steps(config, steps)
        self.schedulers = [get_linear_schedule_with_warmup(optimizer, *schedule) for optimizer in self.optimizers]

    def batch(self, documents: list[Document], length: int) -> dict[str, Any]:
        """Return the documents as its collator packs them into a row of `length`."""
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn

        samples = [
            {
                "input_ids": document.token,
                "loss_mask": document.mask,
                "hidden_states": document.hidden,
                "verifier_last_hidden_states": document.state,
                "lengths": torch.tensor([len(document.token)]),
                "position_ids": torch.arange(len(document.token)),
            }
            for document in documents
        ]
        width = documents[0].last.shape[1]
        return CollateFn(length, width, dtype=self.dtype, preprocess=shift_batch)(samples)

    def trained(self, batch: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens and loss masks of a batch's documents."""
        rows = rows_of(batch["document_ids"])
        return [(batch["input_ids"][0, row], batch["loss_mask"][0, row]) for row in rows]

    def step(self, batch: dict[str, Any]) -> float:
        """Take an optimiser step, as `Trainer.train_epoch` does."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            _, loss, _ = self.model(**batch, **self.call)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for update in (*self.optimizers, *self.schedulers):
            update.step()
        return loss.item()

    def logits(self, batch: dict[str, Any]) -> list[list[Tensor]]:
        """Return the logits of each depth by document, at its rows but the last."""
        depths = captured(self.lm_head, lambda: self.model(**batch, **self.call))
        return [[logits[0, row] for row in rows_of(batch["document_ids"])] for logits in depths]

    def save(self, folder: Path) -> None:
        """Write the head as speculators does."""
        self.model.save_pretrained(folder)


class SpecForge:
    """SpecForge's EAGLE-3 head in training, with the values of its recipes."""

    name, depths, source = "SpecForge", 7, ""  # source: the folder that holds the package

    def __init__(self, target: Path, depths: int, steps: int, seed: int, dtype: torch.dtype) -> None:
        self.modules = specforge(self.source)
        torch.manual_seed(seed)
        self.config = self.modules.llama.LlamaConfig.from_pretrained(target, num_hidden_layers=1)
        self.config.update({"draft_vocab_size": self.config.vocab_size, "tie_word_embeddings": False})
        self.draft = self.modules.llama.LlamaForCausalLMEagle3(self.config, attention_backend="sdpa").to(dtype)
        self.draft.load_embedding(str(target))
        self.draft.freeze_embedding()
        self.lm_head = self.draft.lm_head
        head = self.modules.head.TargetHead(str(target))
        with torch.no_grad():  # `from_pretrained` there asks for an index of several files
            head.fc.weight.copy_(self.draft.embed_tokens.weight)
        head.to(dtype).freeze_weights()
        self.model = self.modules.model.OnlineEagle3Model(self.draft, length=depths, attention_backend="sdpa")
        self.strategy = self.modules.base.Eagle3TrainStrategy(self.model, target_head=head)
        self.optimizer = self.modules.optimizer.BF16Optimizer(self.draft, SPECFORGE_RATE, total_steps=steps)

    def batch(self, documents: list[Document], length: int) -> Any:
        """Return the documents as its collator pads them."""
        data = self.modules.data
        samples = [
            {
                "aux_hidden_state": document.hidden,
                "hidden_state": document.last,
                "input_ids": document.token,
                "loss_mask": document.mask.long(),
            }
            for document in documents
        ]
        tensors = data.build_offline_collator()([data.normalize_offline_sample(sample, length) for sample in samples])
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return self.modules.contracts.TrainBatch([], "eagle3", tensors, {"target_repr": "hidden_state"})

    def trained(self, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens and loss masks of a batch's documents without their first tokens."""
        fields = [batch.tensors[name] for name in ("input_ids", "loss_mask", "attention_mask")]
        return [(token[seen > 0][1:], mask[seen > 0][1:]) for token, mask, seen in zip(*fields, strict=True)]

    def step(self, batch: Any) -> float:
        """Take an optimiser step."""
        loss = self.strategy.forward_loss(batch).loss
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def logits(self, batch: Any) -> list[list[Tensor]]:
        """Return the logits of each depth by document, at its rows but the last."""
        lengths = batch.tensors["attention_mask"].sum(1).tolist()
        depths = captured(self.lm_head, lambda: self.strategy.forward_loss(batch))
        return [[row[: length - 1] for row, length in zip(logits, lengths, strict=True)] for logits in depths]

    def save(self, folder: Path) -> None:
        """Write the head as SpecForge does."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"]}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = self.strategy.checkpoint_state_filter(self.model.state_dict())
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


REFERENCES: dict[str, Any] = {"speculators": Speculators, "SpecForge": SpecForge}


@torch.no_grad()
def captured(module: torch.nn.Module, forward: Callable[[], Any]) -> list[Tensor]:
    """Return a module's outputs in a forward pass."""
    outputs: list[Tensor] = []
    hook = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.clone()))
    forward()
    hook.remove()
    return outputs


def specforge(source: str) -> SimpleNamespace:
    """Return SpecForge's modules, without its compiler and its Triton kernels, which a CPU does not run."""
    if not (Path(source) / "specforge" / "__init__.py").is_file():
        raise ValueError(
            f"--specforge {source!r}: give the folder that holds its package, a checkout or an unpacked wheel"
        )
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    if source not in sys.path:
        sys.path.append(source)
    if "triton" not in sys.modules and find_spec("triton") is None:
        language: Any = ModuleType("triton.language")
        language.constexpr = None
        kernel: Any = ModuleType("triton")
        kernel.jit, kernel.language = (lambda function: function), language
        sys.modules |= {"triton": kernel, "triton.language": language}
    names = {
        "llama": "modeling.draft.llama3_eagle",
        "head": "modeling.target.target_head",
        "model": "algorithms.eagle3.model",
        "base": "training.strategies.base",
        "optimizer": "optimizer",
        "data": "algorithms.eagle3.data",
        "contracts": "runtime.contracts",
        "loss": "core.loss",
    }
    modules: dict[str, Any] = {name: import_module(f"specforge.{path}") for name, path in names.items()}
    modules["model"].LogSoftmaxLoss = SimpleNamespace(apply=modules["loss"]._compute_loss)
    return SimpleNamespace(**modules)
