"""Generate from one prompt, or chat; drafted tokens in one colour, the target's own in another.

python inference/run.py run=outputs/NAME prompt='"def main():"'
python inference/run.py run=outputs/NAME chat=true
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root in place of inference/, so that its files shadow no module
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from heads.common.command import command
from heads.common.errors import user_errors
from heads.common.resolvers import register_resolvers
from heads.common.typed import typed
from heads.common.untrusted import visible
from heads.formats.hub import resolve_head, target_path
from heads.formats.published import is_published
from heads.formats.store import read_config
from inference.chat_template import rendering
from inference.decode import Generation, Settings, autoregress, speculate
from inference.drafters.head import load_drafter, saved_tree
from inference.protocol import Drafter
from inference.target.config import model_config
from inference.target.placement import check_alone
from inference.target.target import Target
from inference.target.tokenizer import tokenize
from inference.text_stream import TextStream
from inference.verification.sample import Sampling

STYLES = {"draft": "green", "bonus": "magenta", "prefill": "magenta"}


@dataclass(frozen=True)
class GenerateConfig:
    """conf/generate.yaml; `model` and `tree` are what differs from the head's own, a None differs in nothing."""

    run: str | None
    prompt: str | None
    chat: bool
    max_new_tokens: int
    min_new_tokens: int
    stop: list[str]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    rule: str
    lossy: bool
    seed: int
    fallback: str
    model: dict[str, Any]
    tree: dict[str, Any]

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which every text ends with: give other ones, or none")
        self.settings()  # what it cannot hold, it says before anything is loaded

    def settings(self) -> Settings:
        """Return how to decode."""
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)
        return Settings(
            self.max_new_tokens,
            sampling,
            stop=tuple(self.stop),
            seed=self.seed,
            rule=self.rule,
            lossy=self.lossy,
            min_new_tokens=self.min_new_tokens,
        )


def load(config: GenerateConfig) -> tuple[Target, Drafter | None]:
    """Return the target, and the head as a drafter if there is a run.

    Raises:
        ValueError: a head or a target cannot be found or loaded, or they do not belong together.
    """
    folder = resolve_head(config.run) if config.run else None
    model = {key: value for key, value in config.model.items() if value is not None}
    names_target = folder is not None and not is_published(folder)  # a published head does not name its target
    saved = read_config(folder)["target"] if folder and names_target else {"name": config.fallback}
    if saved.get("adapter") is not None:
        model = {"adapter": saved["adapter"], **model}
    config_of_target = model_config(**{"path": target_path(saved["name"]), **model})
    check_alone(config_of_target.where, "decoding")
    if folder is not None:
        saved_tree(folder, config.tree)  # says what is wrong with it before the target is loaded
    target = Target.of(config_of_target)
    return target, None if folder is None else load_drafter(folder, config.tree, target, "head")


def plain_ids(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of running text, with the special tokens that the tokenizer begins it with."""
    return list(tokenize(tokenizer, prompt)["input_ids"])


def chat_ids(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
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


class Painter:
    """Prints a generation while it is made: the callback of `speculate`."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self.console, self.stream = console, TextStream(tokenizer)

    def __call__(self, tokens: list[int], sources: list[str]) -> None:
        """Print new tokens; a character that several tokens make has the colour of its last one."""
        for token, source in zip(tokens, sources, strict=True):
            self.show(self.stream.push(token), STYLES[source])

    def close(self, generation: Generation) -> None:
        """Print what was held back, and the summary."""
        self.show(self.stream.rest(), STYLES["bonus"])
        self.console.print()
        self.console.print(Text(summary(generation), style="dim"), soft_wrap=True)

    def show(self, text: str, style: str) -> None:
        """Print a piece as it is: no wrapping, no markup, no control characters."""
        if text:
            self.console.out(visible(text), style=style, highlight=False, end="")


def summary(generation: Generation) -> str:
    """Return one line of numbers: τ and the speed of decoding, without the prefill and its token."""
    if not generation.steps:
        return f"{len(generation.tokens)} token from the prefill alone ({generation.finish})"
    rate = (len(generation.tokens) - 1) / generation.decode_s if generation.decode_s else 0.0
    return (
        f"τ {generation.tau:.2f}, {rate:.1f} tokens/s, {len(generation.tokens)} tokens in {len(generation.steps)} "
        f"target passes after the prefill ({generation.finish}); {STYLES['draft']}: drafted, {STYLES['bonus']}: the "
        "target's own"
    )


def answer(target: Target, drafter: Drafter | None, ids: list[int], settings: Settings, console: Console) -> Generation:
    """Decode one prompt and print it meanwhile."""
    painter = Painter(console, target.tokenizer)
    if drafter is None:
        generation = autoregress(target, ids, settings, painter)
    else:
        generation = speculate(target, drafter, ids, settings, painter)
    painter.close(generation)
    return generation


def converse(
    target: Target, drafter: Drafter | None, lines: Iterable[str], settings: Settings, console: Console
) -> None:
    """Answer line after line, each in view of all before it; empty lines are skipped."""
    messages: list[dict[str, str]] = []
    for line in lines:
        if line.strip():
            messages.append({"role": "user", "content": line.strip()})
            generation = answer(target, drafter, chat_ids(messages, target.tokenizer), settings, console)
            text = str(target.tokenizer.decode(generation.tokens, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": text})


def typed_lines(console: Console) -> Iterable[str]:
    """Yield what the user types or pipes in, line by line, after a sign where it is a person."""
    while True:
        if sys.stdin.isatty():
            console.out("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def generate(config: GenerateConfig, console: Console) -> None:
    """Run the command: a prompt, a chat of one prompt, or a chat from stdin."""
    if config.prompt is None and not config.chat and sys.stdin.isatty():
        raise ValueError("prompt is missing: give prompt='\"...\"', pipe one in, or chat=true")
    settings = config.settings()
    target, drafter = load(config)
    if config.chat:
        lines = typed_lines(console) if config.prompt is None else [config.prompt]
        converse(target, drafter, lines, settings, console)
    else:
        prompt = sys.stdin.read() if config.prompt is None else config.prompt
        answer(target, drafter, plain_ids(prompt, target.tokenizer), settings, console)


@command("generate")
@user_errors()
def main(cfg: DictConfig) -> None:
    """Run the command."""
    register_resolvers()
    generate(typed(GenerateConfig, cfg), Console())


if __name__ == "__main__":
    main()
