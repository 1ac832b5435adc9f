"""format=openvino: the target and the exported head as OpenVINO GenAI loads them, converted by optimum-intel.

Its `optimum-cli` runs as a command: it asks for an older transformers than headstart, so it has an environment of its
own. The layers that an EAGLE-3 head reads are a key of the converted head's rt_info; without it OpenVINO takes others
(outputs 2, L / 2 and L - 3), and none of a target of fewer than ten layers.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heads.common.progress import waiting
from heads.formats.published.plan import STATES

CLI = "optimum-cli"
TASK = ["--task", "text-generation-with-past", "--trust-remote-code"]  # by which it finds its classes of heads
MODEL = "openvino_model.xml"
KEY = "hidden_layers_list"


def convert(folder: Path, served: dict[str, Any], target: str, say: Callable[[str], object]) -> None:
    """Convert an exported head and its target into a folder next to it, or say how if there is no `optimum-cli`.

    Args:
        folder: The exported head.
        served: Its config.json.
        target: The target's folder or Hub id.
        say: What prints a line.

    Raises:
        ValueError: the converter failed; the last line that it wrote.
    """
    out = folder.with_name(f"{folder.name}-openvino")
    models = {"head": (str(folder), TASK), "target": (target, TASK[:2])}  # the small one, which may fail, first
    commands = [
        [CLI, "export", "openvino", "-m", model, *words, str(out / name)] for name, (model, words) in models.items()
    ]
    layers = " ".join(map(str, served.get("eagle_config", {}).get(STATES, [])))
    file, entry = out / "head" / MODEL, f'<{KEY} value="{layers}" />'
    if shutil.which(CLI) is None:
        say(f"no {CLI} here; where optimum-intel is installed, these convert both:")
        commands += [["sed", "-i", rf"s|^\t<rt_info>|&{entry}|", str(file)]] if layers else []
        for command in commands:
            say(shlex.join(command))
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in commands:
        shutil.rmtree(command[-1], ignore_errors=True)
        with waiting(f"{CLI} converts {command[4]}"):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            why = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ValueError(f"{shlex.join(command)}: exit status {done.returncode} ({why})")
    if layers:
        before, rt_info, after = file.read_text(encoding="utf-8").partition("\n\t<rt_info>")
        if not rt_info:
            raise ValueError(f"{file}: no rt_info to name the head's layers in; convert with optimum-intel 2.2.0")
        file.write_text(f"{before}{rt_info}{entry}{after}", encoding="utf-8")
    say(f"{out}: target and head, converted")
