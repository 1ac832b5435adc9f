"""What several files of these tests take."""

from collections.abc import Iterator

import pytest

from tests.eval.small import runs
from tests.ops.doctoring import Ward, unchecked

__all__ = ["runs"]


@pytest.fixture(scope="session")
def wards(tmp_path_factory: pytest.TempPathFactory) -> Ward:
    with unchecked():
        return Ward(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def ward(wards: Ward) -> Iterator[Ward]:
    """Heads are trained once for all files; shapes are unchecked only while one of these runs."""
    with unchecked():
        yield wards
