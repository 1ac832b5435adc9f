"""The planted bugs are still where they were planted."""

import pytest

from benchmarks.planted import BUGS, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}:{bug.right[:30]}")
def test_its_place_stands_once_and_its_tests_exist(bug: Bug) -> None:
    text = (ROOT / bug.file).read_text(encoding="utf-8")
    assert text.count(bug.right) == 1
    assert bug.wrong != bug.right
    assert all((ROOT / path.partition("::")[0]).is_file() for path in bug.tests)
