"""Make the embedded target: tokenizer, training by depth stacking, held-out loss, prompts and card figures.

    python examples/tiny/make_target.py --minutes 60 --out examples/tiny

A deep and narrow Llama, so that a draft step costs about as little beside a target step as it does for real models.
The first part of the budget trains a shallow model; its layer block is then repeated to the full depth and training
goes on (depth stacking, arXiv 2405.15319), since a shallow model sees several times more tokens in the same minutes.
The schedule is a function of elapsed time, so any machine gives what it can in the minutes it is given.
"""

import argparse
import json
import math
import random
import time
from collections import Counter
from pathlib import Path

import torch
from corpus import Function, corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}<|end|>"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{% generation %}{{ message['content'] }}<|end|>"
    "{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT, WINDOW = 512, 256
BATCH_TOKENS = 8192
LAYERS, SHALLOW = 24, 8
SHALLOW_SHARE = 0.45
LONG_SHARE = 0.15
MODULE_SHARE = 0.2
PEAK_LR = 3e-3
MAX_BODY = 900


def make_tokenizer(texts: list[str], functions: list[Function], out: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on a sample of the corpus and save it with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    sample = random.Random(0).sample(texts, min(400, len(texts)))
    tokenizer.train_from_iterator([*sample, *(f.prompt + f.answer for f in functions[::5])], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[3], pad_token=SPECIAL[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = CONTEXT
    fast.save_pretrained(out)
    return fast


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str], functions: list[Function]) -> Tensor:
    """Shuffle chat documents and module pieces into one stream of tokens, MODULE_SHARE of it from modules."""
    chats = [f"<|user|>{f.prompt}<|end|><|assistant|>{f.answer}<|end|>" for f in functions if len(f.answer) <= MAX_BODY]
    budget = int(sum(map(len, chats)) * MODULE_SHARE / (1 - MODULE_SHARE))
    pieces = []
    for text in random.Random(1).sample(texts, len(texts)):
        pieces.append(text[:6000] + SPECIAL[0])
        budget -= len(pieces[-1])
        if budget < 0:
            break
    documents = chats + pieces
    random.Random(2).shuffle(documents)
    ids: list[int] = []
    for start in range(0, len(documents), 1000):
        for encoding in tokenizer._tokenizer.encode_batch(documents[start : start + 1000], add_special_tokens=False):
            ids += encoding.ids
    return torch.tensor(ids)


def build(layers: int, vocab: int) -> LlamaForCausalLM:
    """Build the target's architecture at a given depth."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=384, num_hidden_layers=layers, head_dim=32,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT, rms_norm_eps=1e-6,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=3, pad_token_id=0,
        )
    )  # fmt: skip


def stack(shallow: LlamaForCausalLM, vocab: int) -> LlamaForCausalLM:
    """Return the full-depth model whose layer i is a copy of the shallow model's layer i modulo its depth."""
    deep = build(LAYERS, vocab)
    state = {k: v for k, v in shallow.state_dict().items() if ".layers." not in k}
    for i in range(LAYERS):
        for k, v in shallow.model.layers[i % SHALLOW].state_dict().items():
            state[f"model.layers.{i}.{k}"] = v.clone()
    deep.load_state_dict(state)
    return deep


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates (Jordan et al. 2024), scaled to AdamW's RMS (arXiv 2502.16982).

    torch.optim.Muon iterates in bf16, which a CPU without bf16 units emulates at a hundredth of its fp32 speed; this
    one iterates in fp32 over all matrices of one shape at once.
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
                scale = 0.2 * max(shape) ** 0.5 * group["lr"]
                for matrix, direction in zip(matrices, orthogonalised(update), strict=True):
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


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    return [Muon(matrices, lr=PEAK_LR), torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0)]


def train(model: LlamaForCausalLM, stream: Tensor, seconds: float, schedule: tuple[float, float], start: int) -> int:
    """Train for `seconds` on consecutive windows from `start`; schedule = (learning-rate scale at entry, at exit).

    The windows are WINDOW tokens long, in the last LONG_SHARE of the deep part CONTEXT tokens.
    """
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    opts, begin, position, step = optimizers(model), time.monotonic(), start, 0
    while (done := (time.monotonic() - begin) / seconds) < 1:
        scale = min(1.0, (step + 1) / 80) * (
            schedule[1] + (schedule[0] - schedule[1]) * 0.5 * (1 + math.cos(math.pi * done))
        )
        window = CONTEXT if len(model.model.layers) == LAYERS and done > 1 - LONG_SHARE else WINDOW
        batch = stream[position % (len(stream) - BATCH_TOKENS) :][:BATCH_TOKENS].view(-1, window)
        with torch.autocast("cpu", torch.bfloat16, enabled=native):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = PEAK_LR * scale
            opt.step()
            opt.zero_grad()
        position, step = position + BATCH_TOKENS, step + 1
        if step % 20 == 0:
            rate = (position - start) / (time.monotonic() - begin)
            print(
                f"{len(model.model.layers)} layers step {step} loss {loss.item():.3f} {rate:.0f} tok/s {done:.1%}",
                flush=True,
            )
    return position


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, kept: list[Function]) -> float:
    """Mean loss in nats a token over the answers of the held-out functions."""
    total, count = 0.0, 0
    for f in kept[:300]:
        prompt = tokenizer(f"<|user|>{f.prompt}<|end|><|assistant|>", add_special_tokens=False).input_ids
        answer = tokenizer(f.answer + "<|end|>", add_special_tokens=False).input_ids
        ids = torch.tensor([(prompt + answer)[:CONTEXT]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        count += ids.shape[1] - len(prompt)
    return total / max(count, 1)


def save(model: LlamaForCausalLM, out: Path, vocab: int) -> None:
    """Save in bf16 as transformers does, with both end tokens in the generation config."""
    clean = build(len(model.model.layers), vocab)
    clean.load_state_dict(model.state_dict())
    clean = clean.to(torch.bfloat16)
    clean.generation_config.eos_token_id = [3, 0]
    clean.save_pretrained(out)


def write_jsonl(path: Path, functions: list[Function]) -> None:
    """Write functions as chat records; functions of one name in one module are numbered."""
    seen: Counter[str] = Counter()
    lines = []
    for f in functions:
        seen[f.source] += 1
        name = f.source if seen[f.source] == 1 else f"{f.source}#{seen[f.source]}"
        lines.append(json.dumps({"id": name, "prompt": f.prompt, "answer": f.answer}) + "\n")
    path.write_text("".join(lines))


def main() -> None:
    """Run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--more", action="store_true", help="go on from the weights in --out, with a fresh schedule")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    texts, trained, kept = corpus()
    figures, seconds = args.out / "training.json", args.minutes * 60
    past = json.loads(figures.read_text()) if args.more else {"tokens_seen": 0, "minutes": 0}
    if args.more:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
        stream = token_stream(tokenizer, texts, trained)
        model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
        seen = train(model, stream, seconds, (0.5, 0.02), past["tokens_seen"])
    else:
        tokenizer = make_tokenizer(texts, trained, args.out)
        write_jsonl(args.out / "held_out.jsonl", kept)
        write_jsonl(args.out / "trained.jsonl", trained)
        stream = token_stream(tokenizer, texts, trained)
        model = build(SHALLOW, len(tokenizer))
        seen = train(model, stream, seconds * SHALLOW_SHARE, (1.0, 0.6), 0)
        model = stack(model, len(tokenizer))
        seen = train(model, stream, seconds * (1 - SHALLOW_SHARE), (0.8, 0.02), seen)
    save(model, args.out, len(tokenizer))
    loss = held_out_loss(model.eval(), tokenizer, kept)
    now = {"tokens_seen": seen, "minutes": past["minutes"] + args.minutes, "held_out_loss": loss}
    figures.write_text(json.dumps(now, indent=2) + "\n")
    print(f"{len(trained)} functions, {len(kept)} held out, {len(stream) / 1e6:.1f} M tokens in the stream; {now}")


if __name__ == "__main__":
    main()
