"""Conversion of an exported head and its target for OpenVINO by optimum-intel.

Its `optimum-cli` has an environment of its own, since it needs an older transformers. The layers that an EAGLE-3 head
reads are a key of its rt_info; without it OpenVINO reads outputs 2, L / 2 and L - 3, or none of fewer than ten layers.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from heads.common.typed import Json
from heads.formats.published.plan import STATES

CLI = "optimum-cli"
TASK = ["--task", "text-generation-with-past", "--trust-remote-code"]  # selects optimum's head classes
MODEL = "openvino_model.xml"
KEY = "hidden_layers_list"


def convert(folder: Path, served: Json, target: str, say: Callable[[str], object]) -> None:
    """Convert an exported head, of the config.json `served`, and its target into a folder next to it; `say` prints.

    Without `optimum-cli` say how. Refuse with the converter's last line where it fails.
    """
    out = folder.with_name(f"{folder.name}-openvino")
    export_model = [CLI, "export", "openvino", "-m"]
    commands = [  # the small head first, since it may fail
        [*export_model, str(folder), *TASK, str(out / "head")],
        [*export_model, target, *TASK[:2], str(out / "target")],
    ]
    layers = " ".join(map(str, served.get("eagle_config", {}).get(STATES, [])))
    file, entry = out / "head" / MODEL, f'<{KEY} value="{layers}" />'
    commands += [["sed", "-i", rf"s|^\t<rt_info>|&{entry}|", str(file)]] if layers else []
    if shutil.which(CLI) is None:
        say(f"no {CLI} here; where optimum-intel is installed, these convert both:")
        for command in commands:
            say(shlex.join(command))
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shutil.rmtree(out, ignore_errors=True)
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            why = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ValueError(f"{shlex.join(command)}: exit status {done.returncode} ({why})")
    if layers and entry not in file.read_text(encoding="utf-8"):
        raise ValueError(f"{file}: no rt_info to name the head's layers in; convert with optimum-intel 2.2.0")
    say(f"{out}: target and head, converted")
