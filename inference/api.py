"""Decoding from Python in three lines: a target with its drafter, and text from them.

from headstart import generate, load

target, drafter = load("outputs/tiny-mtp")
text, generation = generate(target, drafter, "Once upon a time")
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from heads.base import Tokens
from heads.common.command import describe_override_error
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.typed import Json, typed
from heads.common.untrusted import visible
from heads.formats.hub import resolve_head, target_path
from heads.formats.published import is_published
from heads.formats.store import read_config
from inference.batch import DrafterLike, SwappableDrafter
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.head import load_drafter, saved_trees
from inference.drafters.plain import Baseline
from inference.protocol import Drafter
from inference.request import RequestConfig
from inference.target.config import ModelConfig, model_config
from inference.target.placement import check_single_process
from inference.target.target import Target
from inference.target.tokenizer import TextStream, text_ids
from inference.verification.sample import GREEDY, Sampling

__all__ = ["GREEDY", "Generation", "RequestParams", "Sampling", "SwappableDrafter", "generate", "load", "speculate"]

OnText = Callable[[str, str], object]  # a piece of text and its origin: "prefill", "draft", "bonus"


@dataclass(frozen=True)
class GenerateConfig(RequestConfig):
    """The configuration in conf/generate.yaml; `model` and `tree` override the head's saved values, None keeps them."""

    run: str | None
    prompt: str | None
    chat: bool
    stop: list[str]
    temperature: float
    fallback: str
    model: Json
    tree: Json

    def __post_init__(self) -> None:
        self.request()  # an invalid value fails before anything is loaded

    def request(self) -> RequestParams:
        """Return the request's parameters."""
        return self.params(self.temperature, stop=self.stop)


@cache
def configured(*overrides: str) -> GenerateConfig:
    """Return the configuration of conf/generate.yaml with overrides."""
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        try:
            return typed(GenerateConfig, compose("generate", [*overrides]))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(describe_override_error(error, overrides, "generate")) from error


def load(run: str | None = None, *overrides: str, target: Target | None = None) -> tuple[Target, Drafter]:
    """Return a frozen target, and the drafter of a run's or published folder or of OWNER/NAME on the Hub.

    Without a run the drafter is the baseline. The overrides are those of `headstart generate`, such as "tree=chain" and
    "model.dtype=bfloat16". If `target` is given, it is returned, and only the drafter is loaded.

    Raises:
        ValueError: a head or a target cannot be found or loaded, or they do not belong together.
    """
    return loaded(replace(configured(*overrides), run=run), target)


def loaded(config: GenerateConfig, target: Target | None = None) -> tuple[Target, Drafter]:
    """Return the target, loaded unless it is given, and the drafter: the head, or the baseline without a run.

    Raises:
        ValueError: a head or a target cannot be found or loaded, or they do not belong together.
    """
    folder = resolve_head(config.run) if config.run else None
    if folder is not None:
        saved_trees(folder, config.tree)  # an invalid tree fails before the target is loaded
    if target is None:
        target, name = Target.of(target_of(config, folder)), "head"
    else:
        name = str(config.run)
        if given := [key for key, value in config.model.items() if value is not None]:
            raise ValueError(f"model.{given[0]} is given beside a target: leave one of them out")
    return target, Baseline(target.device) if folder is None else load_drafter(folder, config.tree, target, name)


def target_of(config: GenerateConfig, folder: Path | None) -> ModelConfig:
    """Return the configuration of the target to load: the overrides over the target that the head was trained for."""
    model = {key: value for key, value in config.model.items() if value is not None}
    saved = {"name": config.fallback}
    if folder is not None and not is_published(folder):  # a published head does not name its target
        saved = read_config(folder)["target"]
    if saved.get("adapter") is not None:
        model = {"adapter": saved["adapter"], **model}
    target = model_config(**{"path": target_path(saved["name"]), **model})
    check_single_process(target.placed, "decoding")
    if sys.stderr.isatty():
        sys.stderr.write(f"loading {visible(target.path)}\n")
    return target


def generate(
    target: Target, drafter: DrafterLike, prompt: str | Tokens, params: RequestParams | None = None,
    on_text: OnText | None = None,
) -> tuple[str, Generation]:  # fmt: skip
    """Decode one prompt, text or tokens; return the generated text and its `Generation`.

    `on_text` receives pieces of whole characters while they are decoded, each with the origin of its last token. The
    default params are those of conf/generate.yaml. `inference.decode.speculate` decodes batches.

    Raises:
        ValueError: the prompt or a parameter is invalid; see `speculate`.
    """
    ids = text_ids(prompt, target.tokenizer) if isinstance(prompt, str) else prompt
    stream, pieces = TextStream(target.tokenizer), []

    def receive(tokens: Tokens, origins: list[str]) -> None:
        for token, origin in zip(tokens, origins, strict=True):
            pieces.append(stream.push(token))
            if pieces[-1] and on_text is not None:
                on_text(pieces[-1], origin)

    generation = speculate(target, drafter, ids, params or configured().request(), receive)
    if (rest := stream.rest()) and on_text is not None:
        on_text(rest, "bonus")
    pieces.append(rest)
    return "".join(pieces), generation
