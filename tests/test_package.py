"""A wheel beside somebody's own train.py and data/: its commands, the snippets of the documentation, the notebook."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

from train.package.build import renamed

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
TINY = (
    "trainer=debug trainer.steps=4 eval.prompts=2 eval.max_new_tokens=16 eval.repeats=1 eval.hf=false eval.tier=[live]"
)
THEIRS = 'raise SystemExit("this module is the user\'s own")'


def run(folder: Path, *words: str) -> str:
    """Run a command of the installed headstart in the user's folder, and return what it prints."""
    path = os.pathsep.join(map(str, (folder / "theirs", folder / "site")))
    env = {**os.environ, "PYTHONPATH": path, "PATH": f"{folder / 'site' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a user's folder with the wheel unpacked in site/, and a trained head."""
    folder = tmp_path_factory.mktemp("user")
    build = ["wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run([*PIP, *build], check=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 20e6
    assert {name.split("/")[0].partition("-")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"headstart"}
    subprocess.run([*PIP, "install", "-q", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    for name in ("train.py", "data/__init__.py", "theirs/eval.py", "theirs/heads/__init__.py", "theirs/inference.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(THEIRS)
    run(folder, "headstart", "train", "head=mtp", *TINY.split())
    return folder


@pytest.mark.slow
def test_an_installed_headstart_has_all_commands_launches_processes_and_completes(folder: Path) -> None:
    assert (folder / "outputs" / "tiny-mtp" / "report.json").is_file()
    words = "run=outputs/tiny-mtp prompts=2 max_new_tokens=8 repeats=1 hf=false tier=[live]"
    assert "report.html" in run(folder, "headstart", "eval", *words.split(), "out=outputs/again")
    assert "drafted" in run(folder, "headstart", "generate", "run=outputs/tiny-mtp", "prompt=a", "max_new_tokens=8")
    assert "tokens trained on" in run(folder, "headstart", "data", "inspect=1")
    assert run(folder, "headstart", "doctor", "outputs/tiny-mtp", "target=site/headstart/examples/tiny")
    run(folder, "headstart", "train", "head=mtp", "launcher=ddp", "launcher.num_processes=2", "name=two", *TINY.split())
    assert (folder / "outputs" / "two" / "head" / "config.json").is_file()
    assert "complete -o nospace" in run(folder, "headstart", "-sc", "install=bash")
    for line, option in (("headstart tr", "train"), ("headstart train head=eag", "head=eagle3")):
        words = ["env", f"COMP_LINE={line}", "headstart", "-sc", "query=bash"]
        assert option in run(folder, *words).split()


@pytest.mark.slow
def test_the_snippets_of_the_documentation_and_the_notebook_run(folder: Path) -> None:
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert snippets
    assert all(run(folder, sys.executable, "-c", snippet) for snippet in snippets)
    notebook = json.loads((ROOT / "examples" / "headstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = re.sub(r"trainer\.steps=.*max_new_tokens=\d+", TINY, "\n".join(cells))
    shown = run(folder, sys.executable, "-c", code)
    assert "tokens per pass" in shown
    assert "lossless" in shown


@pytest.mark.slow
def test_a_checkout_is_headstart_too(tmp_path: Path) -> None:
    install = ["install", "-q", "--no-build-isolation", "--no-deps", "--target", str(tmp_path), "-e", str(ROOT)]
    subprocess.run([*PIP, *install], check=True)
    # Without the site-packages of this Python, which may have another checkout's headstart.
    code = """
        import site, sys
        site.addsitedir(sys.argv[1])
        sys.path += sys.argv[2:]
        import headstart, heads
        print(headstart.load, heads.__file__)
    """
    words = [sys.executable, "-S", "-c", dedent(code), str(tmp_path), *sys.path]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(ROOT / "heads") in shown.stdout


def test_imports_of_ours_are_renamed_and_others_stay() -> None:
    ours, others = ["from heads import x", "    from data.text import y"], ["import os", "from datasets import z"]
    lines = [*others, *(line.replace("from ", "from headstart.") for line in ours), "import headstart.train.step as s"]
    assert renamed("\n".join([*others, *ours, "import train.step as s"])) == "\n".join(lines)
