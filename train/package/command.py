"""The command `headstart`: each sub-command is a script, with the same overrides.

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
    "audit": "ops/audit.py",
    "endpoint": "ops/endpoint.py",
    "watch": "ops/watch.py",
    "loop": "ops/loop.py",
    "budget": "ops/budget.py",
}
CONFIGS = {name: f"ops/{name}" if script.startswith("ops/") else name for name, script in SCRIPTS.items()}


def main() -> None:
    """Run a sub-command, list them, or complete a line."""
    name, *overrides = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("headstart COMMAND [OVERRIDES], and headstart COMMAND --help\n")
        for command, config in CONFIGS.items():  # each with the first line of its YAML
            text = (ROOT / "conf" / f"{config}.yaml").read_text(encoding="utf-8")
            print(f"  {command:9} {re.findall(r'^# python [^:]*: (.*)', text, re.MULTILINE)[0]}")
    elif name in ("-sc", "--shell-completion"):
        program, *line = os.environ.get("COMP_LINE", "headstart train ").split(" ")
        if len(line) < 2:
            print(" ".join(script for script in SCRIPTS if script.startswith("".join(line))))
            return
        import hydra  # it completes by conf/ alone: nothing of ours is imported

        os.environ["COMP_LINE"] = " ".join([program, *line[1:]])
        config = CONFIGS.get(line[0], "train")
        hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name=config)(lambda _: None)()
    elif name not in SCRIPTS:
        near = get_close_matches(name, SCRIPTS, 1)
        meant = f"do you mean {near[0]}?" if near else f"choose one of {', '.join(SCRIPTS)}"
        print(f"error: headstart has no command {name}: {meant}", file=sys.stderr)
        raise SystemExit(2)
    else:
        sys.argv[1:] = overrides
        os.environ["HEADSTART_PROGRAM"] = f"headstart {Path(CONFIGS[name]).name}"  # named in the examples of its help
        runpy.run_path(str(ROOT / SCRIPTS[name]), run_name="__main__")
