"""Generate from one prompt, or chat; drafted tokens in one colour, the target's own in another.

python inference/run.py run=outputs/NAME prompt='"def main():"'
python inference/run.py run=outputs/NAME chat=true
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root in place of inference/, so that its files shadow no module
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterable

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from heads.base import Tokens
from heads.common.command import command
from heads.common.typed import typed
from heads.common.untrusted import visible
from inference import api
from inference.api import GenerateConfig
from inference.decode import Generation, RequestParams
from inference.protocol import Drafter
from inference.target.target import Target
from inference.target.tokenizer import rendering, text_ids, tokenize

STYLES = {"draft": "green", "bonus": "magenta", "prefill": "magenta"}


def chat_ids(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Return the tokens of a conversation, ready for the target's answer.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not render it.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"chat=true: the tokenizer of {tokenizer.name_or_path} has no chat template; leave chat out, or put a "
            "chat_template.jinja beside the model"
        )
    with rendering(tokenizer):
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return list(tokenize(tokenizer, text, add_special_tokens=False)["input_ids"])


def summary(generation: Generation) -> str:
    """Return one line of numbers: τ and the speed of decoding, without the prefill and its token."""
    if not generation.steps:
        return f"{len(generation.tokens)} token from the prefill alone ({generation.finish_reason})"
    rate = (len(generation.tokens) - 1) / generation.decode_s if generation.decode_s else 0.0
    return (
        f"τ {generation.tau:.2f}, {rate:.1f} tokens/s, {len(generation.tokens)} tokens in {len(generation.steps)} "
        f"target passes after the prefill ({generation.finish_reason}); {STYLES['draft']}: drafted, {STYLES['bonus']}: "
        "the target's own"
    )


def answer(
    target: Target, drafter: Drafter, ids: Tokens, params: RequestParams, console: Console
) -> tuple[str, Generation]:
    """Decode one prompt, stream it, and print a summary; return the text and the generation."""

    def show(piece: str, origin: str) -> None:
        console.out(visible(piece), style=STYLES[origin], highlight=False, end="")  # no markup, no control characters

    text, generation = api.generate(target, drafter, ids, params, show)
    console.print()
    console.print(Text(summary(generation), style="dim"), soft_wrap=True)
    return text, generation


def converse(target: Target, drafter: Drafter, lines: Iterable[str], params: RequestParams, console: Console) -> None:
    """Answer each line with the whole conversation as context; empty lines are skipped, a person is shown a sign."""
    messages = []
    sign = "> " if sys.stdin.isatty() and lines is sys.stdin else ""
    console.out(sign, end="")
    for line in lines:
        if line.strip():
            messages.append({"role": "user", "content": line.strip()})
            text, _ = answer(target, drafter, chat_ids(messages, target.tokenizer), params, console)
            messages.append({"role": "assistant", "content": text})
        console.out(sign, end="")


def generate(config: GenerateConfig, console: Console) -> None:
    """Run the command: a prompt, a chat of one prompt, or a chat from stdin."""
    if config.prompt is None and not config.chat and sys.stdin.isatty():
        raise ValueError("prompt is missing: give prompt='\"...\"', pipe one in, or chat=true")
    params = config.request()
    target, drafter = api.loaded(config)
    if config.chat:
        converse(target, drafter, sys.stdin if config.prompt is None else [config.prompt], params, console)
    else:
        prompt = sys.stdin.read() if config.prompt is None else config.prompt
        answer(target, drafter, text_ids(prompt, target.tokenizer), params, console)


@command("generate")
def main(cfg: DictConfig) -> None:
    """Run the command."""
    generate(typed(GenerateConfig, cfg), Console())


if __name__ == "__main__":
    main()
