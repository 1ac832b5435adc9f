"""A served model, a workload for it, and measurements of the one on the other that take a moment."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.report.write import Report, read_report
from eval.run import publish
from heads.common.typed import from_yaml
from ops.endpoint import ServedConfig, measure
from tests.ops.endpoint_server import Served, key_of, passes, words

TOKENS = 12
PROMPTS = 4


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as made:
        yield made


@pytest.fixture
def plain() -> Iterator[Served]:
    with Served(drafts=False) as made:
        yield made


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a workload of two categories; it is asked of this machine, without a key."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("ops.served.LAG_S", 0.2)
    file = tmp_path / "log.jsonl"
    lines = [{"id": f"p{i}", "prompt": f"say {i}", "category": "ab"[i % 2]} for i in range(PROMPTS + 1)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def config(served: Served, log: Path, **values: Any) -> ServedConfig:
    """Return a measurement of the server that takes a moment, its report in the workload's folder."""
    given = {
        "url": served.url, "workload": str(log), "out": str(log.parent / "report"), "prompts": PROMPTS,
        "max_new_tokens": TOKENS, "repeats": 1, "warmup": 1,
        "client": {"model": None, "chat": True, "timeout": 10.0, "api_key_env": "OPENAI_API_KEY", "extra": {}},
    }  # fmt: skip
    return from_yaml(ServedConfig, "ops/endpoint", **(given | values))


def measured(config: ServedConfig) -> Report:
    """Measure, and write the report."""
    report = measure(config)
    publish(report, Path(config.out))
    return report


def expected() -> list[list[int]]:
    """Return what each pass of each measured prompt accepts."""
    keys = [key_of({"messages": [{"role": "user", "content": f"say {i}"}]}) for i in range(PROMPTS)]
    return [passes(key, TOKENS - 1) for key in keys]


def rows_of(log: Path) -> list[dict[str, Any]]:
    """Return the rows of the report that was written, those of whole workloads."""
    told = read_report(log.parent / "report" / "report.json")
    return [row for row in told["rows"] if not row["category"]]


def wrong(key: str, count: int) -> list[str]:
    """Answer one prompt otherwise, from the fourth token on."""
    return words(key, 3) + [" <b>no</b>"] * (count - 3) if "say 2" in key else words(key, count)


def refuse(log: Path, message: str, served: Served, **values: Any) -> None:
    """See the measurement refused in one line, and nothing written."""
    with pytest.raises(ValueError, match=message) as error:
        measured(config(served, log, **values))
    assert "\n" not in str(error.value)
    assert not (log.parent / "report").exists()
