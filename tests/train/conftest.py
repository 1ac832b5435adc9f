"""An undisturbed run, a run to publish, and a Hub to publish it on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from heads.formats.store import TargetSpec
from tests.train.hub_server import Hub, become
from tests.train.publishing import write_run
from tests.train.undisturbed import Toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def spec(tmp_path: Path) -> TargetSpec:
    target = tmp_path / "secret" / "target"
    target.mkdir(parents=True)
    (target / "tokenizer.json").write_text("{}")
    return TargetSpec(str(target), 11, 4, 3, "f00d")


@pytest.fixture
def run(tmp_path: Path, spec: TargetSpec) -> Path:
    return write_run(tmp_path / "outputs" / "tiny-medusa", spec)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        become(hub, monkeypatch, tmp_path / "cache")
        yield hub
