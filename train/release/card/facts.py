"""The records that the card is made of; untrusted names and values in it are shown literally, never as markup."""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from eval.measures.results import LIVE
from eval.report.view import Result, results_of
from heads.formats.hub import on_hub
from train.release.config import PublishConfig

MARKUP = re.compile(r"([\\`*_\[\]<>~&#!|])")


@dataclass(frozen=True)
class Facts:
    """The records of a head; an empty mapping where the run has none of that kind."""

    publish: PublishConfig
    config: dict[str, Any]  # the head's own config.json
    served: dict[str, Any]  # the published one, another in a foreign format
    tokenizer_sha256: str | None  # of the target's tokenizer.json
    report: dict[str, Any]
    provenance: dict[str, Any]
    settings: dict[str, Any]  # the run's config.yaml
    refused: dict[str, str]  # why formats of engines do not take the exported head, by format
    base_id: str | None  # the Hub's id of a model, in the config.json of a target that is a folder
    decodes: bool  # whether the folder carries custom_generate

    @property
    def kind(self) -> str:
        """The kind of the head."""
        return str(self.config["head"]["name"])

    @property
    def run(self) -> Path:
        """The run's folder."""
        return Path(self.publish.run).expanduser()

    @property
    def head(self) -> dict[str, Any]:
        """The head's configuration, without a limit of its vocabulary that the target's lies within."""
        whole = (self.config["head"].get("draft_vocab") or 0) >= self.config["target"]["vocab_size"]
        return {**self.config["head"], **({"draft_vocab": None} if whole else {})}

    @property
    def model(self) -> str | None:
        """The target's id on the Hub: its name, or that which the config.json in its folder has; None without one."""
        return self.base if self.hub else self.base_id

    @property
    def hub(self) -> bool:
        """Whether the target is on the Hub."""
        return on_hub(self.config["target"]["name"])

    @property
    def base(self) -> str:
        """The target: its Hub id, or the last part of its folder."""
        name = str(self.config["target"]["name"])
        return name if self.hub else Path(name).name

    @property
    def path(self) -> str:
        """The target's path in command lines."""
        return self.base if self.hub else f"path/to/{self.base}"

    @property
    def live(self) -> list[Result]:
        """The results by decoding, which a clock has measured."""
        return [result for result in results_of(self.report) if result.row.get("tier", LIVE) == LIVE]

    @property
    def mine(self) -> list[Result]:
        """Those of them that are this head's."""
        return [result for result in self.live if self.has_drafter(result.row["drafter"])]

    @property
    def drawbacks(self) -> list[str]:
        """What the run's own report says against the head, in sentences."""
        whole = [result for result in self.mine if result.overall and result.row.get("request_rate") is None]
        speedups = [result.row["speedup"] for result in whole if result.row["speedup"] is not None]
        sentences = ["It is not lossless in its own report, which therefore gives it no speedup."]
        sentences *= any(result.failed for result in whole)
        if speedups and max(speedups) < 1:
            best = f"{max(speedups):.2f} times the same engine without drafts at best"
            sentences.append(f"It is slower than decoding without it in its own report: {best}.")
        return sentences

    def has_drafter(self, drafter: str) -> bool:
        """Whether a row's drafter is this head, named by its kind, and by its run too where there are several."""
        kind, _, run = drafter.partition(" ")
        return kind == self.kind and (not run or Path(run).name == self.run.resolve().name)


def escaped(text: str) -> str:
    """Return a text in one line, every sign of Markdown and HTML in it as itself."""
    return MARKUP.sub(r"\\\1", " ".join(text.split()))


def code(value: object) -> str:
    """Return a value as code, whatever backticks it holds."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def block(text: str, language: str = "") -> str:
    """Return lines as a block of code, whatever backticks they hold."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def bullets(values: dict[str, Any]) -> str:
    """Return a nested list of everything that is set."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"- {escaped(str(key))}:", *(indent(bullets(value), "  ").splitlines())]
        elif value not in (None, [], {}, ""):
            lines.append(f"- {escaped(str(key))}: {code(value)}")
    return "\n".join(lines)
