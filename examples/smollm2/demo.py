"""SmolLM2-135M-Instruct alone and with its draft head, side by side on held-out questions: make demo-chat.

    python examples/smollm2/demo.py MODEL [HEAD] [DTYPE]

MODEL is the GGUF, or a folder of the model; DTYPE is that of the passes, by default the fast one of the machine. Each
question is answered twice, a pass of one side at a time: the side that has used less time goes next, so both texts grow
as fast as each decoder is, and whatever else the machine does slows both. Decoding is greedy: the texts are the same,
token for token, or first differ where rounding turns a near tie of two logits, as passes of another shape do in
bfloat16; in float32 none differs.
"""

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[0] = str(HERE.parent.parent)

import torch
from omegaconf import OmegaConf
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from eval.measures.losslessness import gate
from eval.measures.metrics import acceptance, paired_interval, speed, speed_ratio
from heads.common.command import ROOT
from heads.common.errors import user_errors
from heads.common.typed import typed
from inference.api import load
from inference.batch import batch_of
from inference.decode import Generation, RequestParams
from inference.drafters.hybrid import Hybrid
from inference.drafters.plain import Baseline
from inference.drafters.registry import make
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import GREEDY

NEW_TOKENS = 96
LINES = 12  # of a text's end that a panel shows


class Side:
    """One of the two decoders, and what its passes over the question at hand took."""

    def __init__(self, name: str, target: Target, drafter: Drafter) -> None:
        self.name, self.batch = name, batch_of(target, drafter, 1)

    def ask(self, prompt: list[int]) -> None:
        """Begin an answer; the prefill, which both sides run alike, is not timed."""
        self.answer, self.seconds = self.batch.admit(0, prompt, RequestParams(NEW_TOKENS, GREEDY, logit_gaps=True)), 0.0

    def step(self) -> None:
        """Decode one pass."""
        begin = time.perf_counter()
        self.batch.step()
        self.seconds += time.perf_counter() - begin
        self.batch.release()

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens after the prefill's, and their seconds."""
        return len(self.answer.tokens) - 1, self.seconds


@torch.inference_mode()
def main(model: str, head: str = str(HERE / "head"), dtype: str = "auto") -> None:
    """Answer all questions with both sides; print the texts, the speedup with its interval, and what differs."""
    console = Console()
    questions = [json.loads(line) for line in (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    target, drafter = load(head, f"model.path={model}", f"model.dtype={dtype}")
    config = typed(Hybrid.Config, OmegaConf.load(ROOT / "conf" / "drafter" / "hybrid.yaml"))
    both = Hybrid(config, drafter, make("lookup", config.lookup, target), "head and suffix")
    sides = [Side("target alone", target, Baseline(target.device)), Side("with its head", target, both)]
    measured: list[list[tuple[int, float]]] = [[], []]
    answers: list[list[Generation]] = [[], []]

    def texts() -> Columns:
        panels = []
        for side in sides:
            lines = target.tokenizer.decode(side.answer.tokens, skip_special_tokens=True).splitlines()[-LINES:]
            title = f"{side.name}, {speed([side.decoded]) or 0:.0f} tokens/s"
            panels.append(Panel(Text("\n".join(lines)), title=title, height=LINES + 2, width=console.width // 2 - 1))
        return Columns(panels)

    for question in questions:
        chat = [{"role": "user", "content": question["turns"][0]}]
        prompt = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        console.print(f"\n[bold]{question['category']}[/bold]", Text(question["turns"][0]))
        for side in sides:
            side.ask(prompt)
        with Live(texts(), console=console, auto_refresh=False) as live:
            while waiting := [side for side in sides if not side.answer.finish_reason]:
                min(waiting, key=lambda side: side.seconds).step()
                live.update(texts(), refresh=console.is_terminal)
            live.update(texts(), refresh=True)
        for side, pairs, several in zip(sides, measured, answers, strict=True):
            pairs.append(side.decoded)
            several.append(side.answer)
    alone_pairs, pairs = measured
    ids = [str(question["question_id"]) for question in questions]
    counts = gate(*answers, ids, target.dtype).counts()
    low, high = paired_interval(pairs, alone_pairs, seed=0) or (float("nan"),) * 2
    console.print(
        f"\n{len(questions)} questions: {speed(alone_pairs):.1f} tokens/s alone, {speed(pairs):.1f} with the head: "
        f"{speed_ratio(pairs, alone_pairs):.2f}x [{low:.2f}, {high:.2f}], "
        f"{acceptance(answers[1]).tau:.2f} tokens per pass of the target; {counts['identical']} texts are the same, "
        f"{counts['near_tie']} part at a near tie of two logits, {counts['failed']} are wrong",
        soft_wrap=True,
        highlight=False,
    )
    if counts["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    with user_errors():
        main(*sys.argv[1:])
