"""The recipe of a target that is trained here: tokenizer, shape, optimisers, a schedule by elapsed time, its loss.

make_target.py makes the bundled target by it, and benchmarks/gpu/target.py a larger one on an accelerator. The first
part of the budget trains a shallow model; its layer block is then repeated to the full depth and training goes on
(depth stacking, arXiv 2405.15319), since a shallow model sees several times more tokens in the same minutes. The
schedule is a function of elapsed time, so any machine gives what it can in the minutes it is given.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
END, USER, ASSISTANT, STOP = SPECIAL
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}<|end|>"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{% generation %}{{ message['content'] }}<|end|>"
    "{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHALLOW_SHARE = 0.45
LONG_SHARE = 0.15
ENTRY, TURN, EXIT = 1.0, 0.6, 0.02  # of the peak rate: as the shallow part begins, as it ends, as training ends
BACK = 0.8  # as the deep part begins
LOG_EVERY = 20
TOGETHER = 16  # documents in one pass of the held-out loss


@dataclass(frozen=True)
class Recipe:
    """The shape of a Llama, and what its training does in a step.

    Attributes:
        vocab: tokens of the byte-level BPE, special ones included.
        width, inner: of hidden states and of the MLP.
        heads, kv_heads: of attention, `width / heads` wide.
        layers: of the target.
        shallow: of the model that the first part trains; a divisor of `layers`.
        context: the longest window, and what the target's config says.
        window: tokens of a row until the last LONG_SHARE of the deep part, whose rows have `context`.
        batch_tokens: of a step.
        peak_lr, warm_steps: the learning rate that the schedule scales, and the steps of a part until it is reached.
    """

    vocab: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    shallow: int
    context: int
    window: int
    batch_tokens: int
    peak_lr: float
    warm_steps: int


EMBEDDED = Recipe(
    vocab=2048, width=128, inner=384, heads=4, kv_heads=2, layers=24, shallow=8, context=512, window=256,
    batch_tokens=8192, peak_lr=3e-3, warm_steps=80,
)  # fmt: skip


class Part(NamedTuple):
    """A part of the training: its seconds, the scale of the rate at entry and exit, the stream's place it starts at."""

    seconds: float
    entry: float
    exit: float
    start: int


class Point(NamedTuple):
    """A point of the loss curve: the model's layers, the step in its part, tokens since the start, loss, seconds."""

    layers: int
    step: int
    tokens: int
    loss: float
    seconds: float


class Loss(NamedTuple):
    """The loss of held-out text: nats summed over so many tokens, which stand for so many bytes of text."""

    nats: float
    tokens: int
    bytes: int

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """By token."""
        return math.exp(self.mean)

    @property
    def bits_per_byte(self) -> float:
        """What does not depend on the tokenizer."""
        return self.nats / math.log(2) / max(self.bytes, 1)


def make_tokenizer(sample: Iterable[str], recipe: Recipe, out: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on a sample of the text and save it with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(sample, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=STOP, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = recipe.context
    fast.save_pretrained(out)
    return fast


def chat(turns: Sequence[str]) -> str:
    """Return a chat, the user's turn and the assistant's in turn, as the template renders it."""
    return "".join((ASSISTANT if i % 2 else USER) + turn + STOP for i, turn in enumerate(turns))


def encoded(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> Tensor:
    """Return documents, one after another, as one stream of tokens."""
    found = []
    for start in range(0, len(documents), 1000):
        made = tokenizer._tokenizer.encode_batch(documents[start : start + 1000], add_special_tokens=False)
        found.append(torch.tensor([token for each in made for token in each.ids]))
    return torch.cat(found)


def build(recipe: Recipe, layers: int, vocab: int) -> LlamaForCausalLM:
    """Build the target's architecture at a given depth."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=recipe.width, intermediate_size=recipe.inner, num_hidden_layers=layers,
            head_dim=recipe.width // recipe.heads, num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads, max_position_embeddings=recipe.context, rms_norm_eps=1e-6,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=3, pad_token_id=0,
        )
    )  # fmt: skip


def stack(shallow: LlamaForCausalLM, recipe: Recipe, vocab: int) -> LlamaForCausalLM:
    """Return the full-depth model whose layer i is a copy of the shallow model's layer i modulo its depth."""
    deep = build(recipe, recipe.layers, vocab)
    state = {k: v for k, v in shallow.state_dict().items() if ".layers." not in k}
    for i in range(recipe.layers):
        for k, v in shallow.model.layers[i % recipe.shallow].state_dict().items():
            state[f"model.layers.{i}.{k}"] = v.clone()
    deep.load_state_dict(state)
    return deep.to(shallow.device)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates (Jordan et al. 2024), scaled to AdamW's RMS (arXiv 2502.16982).

    torch.optim.Muon iterates in bf16, which a CPU without bf16 units emulates at a hundredth of its fp32 speed, and
    over one matrix after another; this one iterates over all matrices of one shape at once, in fp32 on a CPU.
    """

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix once."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                shapes.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in shapes.items():
                buffers = [self.state[m].setdefault("buffer", torch.zeros_like(m)) for m in matrices]
                for buffer, matrix in zip(buffers, matrices, strict=True):
                    buffer.lerp_(matrix.grad, 1 - group["momentum"])
                update = torch.stack(
                    [m.grad.lerp(b, group["momentum"]) for m, b in zip(matrices, buffers, strict=True)]
                )
                kind = torch.float32 if update.device.type == "cpu" else torch.bfloat16
                scale = 0.2 * max(shape) ** 0.5 * group["lr"]
                for matrix, direction in zip(matrices, orthogonalised(update.to(kind)), strict=True):
                    matrix.mul_(1 - group["lr"] * group["decay"]).sub_(direction, alpha=scale)


def orthogonalised(update: Tensor) -> Tensor:
    """Push the singular values of a batch of matrices towards one by five quintic Newton-Schulz steps."""
    wide = update.shape[-2] <= update.shape[-1]
    x = update if wide else update.mT
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


def optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    fused = model.device.type == "cuda"
    adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    return [Muon(matrices, lr=lr), adamw]


def train(model: LlamaForCausalLM, stream: Tensor, recipe: Recipe, part: Part, curve: list[Point]) -> int:
    """Train on consecutive windows of the stream for the part's seconds, compilation on an accelerator included.

    Returns:
        the place in the stream, counted on over its ends, that the next part starts at. `curve` gets a point after
        the first step and every LOG_EVERY steps.
    """
    kind = model.device.type
    quick = kind == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if kind == "cuda":  # one layer's graph serves all of them
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    opts, begin, position, step = optimizers(model, recipe.peak_lr), time.monotonic(), part.start, 0
    while (done := (time.monotonic() - begin) / part.seconds) < 1:
        scale = min(1.0, (step + 1) / recipe.warm_steps) * (
            part.exit + (part.entry - part.exit) * 0.5 * (1 + math.cos(math.pi * done))
        )
        late = len(model.model.layers) == recipe.layers and done > 1 - LONG_SHARE
        window = recipe.context if late else recipe.window
        batch = stream[position % (len(stream) - recipe.batch_tokens) :][: recipe.batch_tokens].view(-1, window)
        with torch.autocast(kind, torch.bfloat16, enabled=quick):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = recipe.peak_lr * scale
            opt.step()
            opt.zero_grad()
        position, step = position + recipe.batch_tokens, step + 1
        if step == 1 or step % LOG_EVERY == 0:
            value, spent = loss.item(), time.monotonic() - begin
            curve.append(Point(len(model.model.layers), step, position, value, spent))
            rate = (position - part.start) / spent
            print(
                f"{len(model.model.layers)} layers step {step} loss {value:.3f} {rate:.0f} tok/s {done:.1%}", flush=True
            )
    return position


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: Sequence[Sequence[str]], context: int
) -> Loss:
    """Return the loss over what the assistant says in chats, each cut to the context; their ends count as tokens."""
    rows = sorted((_marked(tokenizer, turns, context) for turns in chats), key=lambda row: len(row[0]))
    nats, tokens = 0.0, 0
    for start in range(0, len(rows), TOGETHER):
        some = rows[start : start + TOGETHER]
        width = len(some[-1][0])
        token, mark = (
            torch.tensor([row[i] + [0] * (width - len(row[i])) for row in some], device=model.device) for i in (0, 1)
        )
        logits = model(input_ids=token, use_cache=False).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), token[:, 1:], reduction="none")
        nats += (each * mark[:, 1:]).sum().item()
        tokens += int(mark[:, 1:].sum())
    kept = [[token for token, marked in zip(*row, strict=True) if marked] for row in rows]
    said = sum(len(str(tokenizer.decode(row, skip_special_tokens=True)).encode()) for row in kept)
    return Loss(nats, tokens, said)


def _marked(tokenizer: PreTrainedTokenizerFast, turns: Sequence[str], context: int) -> tuple[list[int], list[int]]:
    """Return a chat's tokens, and of each whether it is one that the assistant says."""
    token: list[int] = []
    mark: list[int] = []
    for i, turn in enumerate(turns):
        pieces = [(ASSISTANT, 0), (turn + STOP, 1)] if i % 2 else [(USER + turn + STOP, 0)]
        for text, said in pieces:
            ids: Any = tokenizer(text, add_special_tokens=False).input_ids
            token, mark = token + ids, mark + [said] * len(ids)
    return token[:context], mark[:context]


def save(model: LlamaForCausalLM, recipe: Recipe, out: Path, vocab: int) -> None:
    """Save in bf16 as transformers does, with both end tokens in the generation config."""
    clean = build(recipe, len(model.model.layers), vocab)
    clean.load_state_dict(model.state_dict())
    clean = clean.to(torch.bfloat16)
    clean.generation_config.eos_token_id = [3, 0]
    clean.save_pretrained(out)
