"""OpenVINO's converter, whose transformers is older than ours, takes a published folder as it is."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.heads.shipped import shipped
from tests.serving.engines import ENVIRONMENT
from tests.serving.heads_of_ours import exported, made
from tests.serving.test_loaders import DFLASH, PLAIN, PRUNED

pytestmark = pytest.mark.serving


@pytest.mark.parametrize(("kind", "options"), [("eagle3", PLAIN | PRUNED), ("block", DFLASH | {"causal": False})])
def test_a_published_folder_is_converted(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = shipped(exported(made(kind, **options), "vllm", tmp_path / "head"))
    words = ["--task", "text-generation-with-past", "--trust-remote-code", str(tmp_path / "converted")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [ENVIRONMENT / "intel" / "bin" / "optimum-cli", "export", "openvino", "-m", folder, *words],
        capture_output=True, text=True, check=False,
        env=environment | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "converted" / "openvino_model.xml").is_file()
