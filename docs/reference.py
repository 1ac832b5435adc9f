"""The site's page of commands and overrides, made of conf/ when the site is built, and links out of docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

CONF = Path(__file__).resolve().parent.parent / "conf"
COMMANDS = {
    "train.yaml": "python train/run.py",
    "eval.yaml": "python eval/run.py",
    "data.yaml": "python data/run.py",
    "generate.yaml": "python inference/run.py",
    "publish.yaml": "python train/publish.py",
    "convert.yaml": "python train/convert.py",
    "search.yaml": "python eval/search_skips.py",
    "streams.yaml": "python train/streams.py",
    **{f"ops/{file.name}": f"python ops/{file.stem}.py" for file in sorted((CONF / "ops").glob("*.yaml"))},
}
GROUPS = (
    "model",
    "head",
    "objective",
    "peft",
    "data",
    "features",
    "trainer",
    "launcher",
    "tree",
    "drafter",
    "experiment",
)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the page of the reference."""
    files.append(File.generated(config, "reference.md", content=page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show the path of a file outside docs/, which is in the repository and not on the site."""
    return OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].removeprefix('../')}`)", markdown)


def page() -> str:
    """Return the reference as Markdown: each command with its values, then each group with its choices."""
    commands = [_section(f"`{command}`", CONF / name) for name, command in COMMANDS.items()]
    groups = [_group(CONF / name) for name in GROUPS]
    opening = (
        "# Commands and overrides\n\nEvery value below is an override: `key=value` after the command, a dot leading "
        "inwards, as in `trainer.steps=300`. A group's choice is `group=choice`. The values are the defaults."
    )
    return "\n\n".join([opening, *commands, "## Groups", *groups])


def _section(title: str, file: Path) -> str:
    return f"## {title}\n\n```yaml\n{file.read_text(encoding='utf-8').rstrip()}\n```"


def _group(folder: Path) -> str:
    """Return a group with a block for each choice, folded but for the first."""
    blocks = []
    for file in sorted(folder.rglob("*.yaml")):
        name = file.relative_to(folder).with_suffix("").as_posix()
        body = f"```yaml\n{file.read_text(encoding='utf-8').rstrip()}\n```"
        blocks.append(f'??? note "{folder.name}={name}"\n\n' + "\n".join(f"    {line}" for line in body.splitlines()))
    return "\n\n".join([f"### `{folder.name}=`", *blocks])
