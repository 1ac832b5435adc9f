"""Every benchmark calls what is there, and the planted bugs are still where they were planted."""

from pathlib import Path

import pytest
from mypy.config_parser import parse_config_file
from mypy.options import Options

from benchmarks.planted import BUGS, Bug

ROOT = Path(__file__).parents[2]


def test_make_types_sees_what_a_benchmark_imports_or_calls_and_is_gone() -> None:
    options = Options()
    parse_config_file(options, lambda: None, str(ROOT / "pyproject.toml"))
    assert "benchmarks" in (options.packages or ())
    for module in ("benchmarks.training", "benchmarks.gpu.training"):
        unseen = {code.code for code in options.clone_for_module(module).disabled_error_codes}
        assert not unseen & {"attr-defined", "name-defined", "import-not-found", "call-arg", "arg-type", "operator"}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}:{bug.right[:30]}")
def test_a_bugs_place_stands_once_and_its_tests_exist(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text(encoding="utf-8").count(bug.right) == 1
    assert bug.wrong != bug.right
    assert all((ROOT / path.partition("::")[0]).is_file() for path in bug.tests)
