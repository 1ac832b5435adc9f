"""The command `headstart`: each sub-command is one of the scripts, with the same overrides.

eval "$(headstart -sc install=bash)" completes sub-commands and overrides in bash; fish has install=fish.
"""

import os
import re
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "conf").is_dir())
SCRIPTS = {
    "train": "train/run.py",
    "eval": "eval/run.py",
    "data": "data/run.py",
    "generate": "inference/run.py",
    "publish": "train/publish.py",
    "doctor": "ops/doctor.py",
    "replace": "ops/replace.py",
    "audit": "eval/run.py",
}
CONFIGS = {name: name for name in SCRIPTS} | {"doctor": "ops/doctor", "replace": "ops/replace", "audit": "eval"}
PLAIN = {"doctor": ("run",), "audit": ("audit", "baseline")}  # keys of the first words, which may come without
NEEDED = {
    "audit": "headstart audit needs two URLs, that of the server to audit and that of the same model without "
    "speculation: headstart audit http://localhost:8000 http://localhost:8001",
    "doctor": "headstart doctor needs a head, a folder or OWNER/NAME on the Hub: headstart doctor outputs/mine",
}


def main() -> None:
    """Run a sub-command, list them, or complete a line."""
    name, words = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in ("-h", "--help"):
        print(overview())
    elif name in ("-sc", "--shell-completion"):
        complete()
    elif name not in SCRIPTS:
        near = get_close_matches(name, SCRIPTS, 1)
        meant = f"do you mean {near[0]}?" if near else f"choose one of {', '.join(SCRIPTS)}"
        print(f"error: headstart has no command {name}: {meant}", file=sys.stderr)
        raise SystemExit(2)
    else:
        for i, (key, word) in enumerate(zip(PLAIN.get(name, ()), words, strict=False)):
            if word.startswith("-") or re.match(r"[\w.]+=", word):
                break
            words[i] = f"{key}={word}"
        if name in NEEDED and not any(re.match(rf"-|({PLAIN[name][0]}|experiment)=", word) for word in words):
            print(f"error: {NEEDED[name]}", file=sys.stderr)
            raise SystemExit(2)
        sys.argv[1:] = words
        # For the examples of its help.
        os.environ["HEADSTART_PROGRAM"] = f"headstart {CONFIGS[name].rpartition('/')[2]}"
        runpy.run_path(str(ROOT / SCRIPTS[name]), run_name="__main__")


def overview() -> str:
    """Return a line for each sub-command: what it does, from its YAML."""
    lines = []
    for name, config in CONFIGS.items():
        about = r"^audit: null # (.*)" if name == "audit" else r"^# python [^:]*: (.*)"
        first = re.search(about, (ROOT / "conf" / f"{config}.yaml").read_text(encoding="utf-8"), re.MULTILINE)
        lines.append(f"  {name:9} {first[1] if first else ''}")
    return "\n".join(["headstart COMMAND [OVERRIDES], and headstart COMMAND --help", "", *lines])


def complete() -> None:
    """Let Hydra complete a line, from conf/ alone: nothing of ours is imported."""
    program, *words = os.environ.get("COMP_LINE", "headstart train ").split(" ")
    if len(words) < 2:
        print(" ".join(name for name in SCRIPTS if name.startswith("".join(words))))
        return
    import hydra

    os.environ["COMP_LINE"] = " ".join([program, *words[1:]])
    config = CONFIGS.get(words[0], "train")
    hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name=config)(lambda _: None)()
