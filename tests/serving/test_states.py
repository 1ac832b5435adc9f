"""Training from the states that vLLM computes, in fp32 on this CPU: the losses of training from the live target."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import command
from tests.serving.test_endpoint import server
from tests.train import jobs

pytestmark = pytest.mark.serving
IDS = [2, 12, 21, 24]  # what EAGLE-3 reads of the embedded target, and its last state
STEPS = 12
SHORT = [
    f"trainer.steps={STEPS}", "trainer.batch_tokens=2048", "trainer.micro_tokens=1024", "trainer.log_every=1",
    "trainer.eval_prompts=0", "eval.prompts=0", "data.limit=300", "model.dtype=float32", "trainer.precision=fp32",
    "init=null",  # the fitted start needs the target, which an engine spares
    "trainer.optimizer=adamw", "trainer.lr=3e-3",  # Muon's matrix steps, in bf16, enlarge what differs by a rounding
]  # fmt: skip


def extracting(connector: str, **extra: Any) -> list[str]:
    """Return what vLLM is started with to send the states; its own connectors' copies need CUDA."""
    model = {"hf_config": {"eagle_aux_hidden_state_layer_ids": IDS}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": model}
    where = {"kv_connector_module_path": "tests.serving.cpu_connector", "kv_connector_extra_config": extra}
    transfer = {"kv_connector": connector, "kv_role": "kv_producer", **where}
    said = ["--no-enable-chunked-prefill", "--speculative-config", json.dumps(method)]
    return [*said, "--kv-transfer-config", json.dumps(transfer)]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of training from the live target."""
    out = tmp_path_factory.mktemp("live") / "run"
    command("train/run.py", "head=eagle3", *SHORT, f"out={out}")
    return jobs.losses(out)


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_the_losses_are_the_live_targets(live: dict[int, float], tmp_path: Path, memory: Path) -> None:
    with server(tmp_path / "vllm.log", *extracting("CpuHiddenStatesConnector", shared_storage_path=str(memory))) as url:
        said = ["features=engine", f"features.url=[{url}/v1]", f"features.vllm={memory}", f"features.vllm_layers={IDS}"]
        command("train/run.py", "head=eagle3", *SHORT, *said, f"out={tmp_path / 'run'}", OMP_NUM_THREADS="1")
    found = jobs.losses(tmp_path / "run")
    assert len(found) == STEPS
    assert found == pytest.approx(live, rel=1e-5)
    assert list(memory.iterdir()) == []
