"""What a process of a run does about its machine."""

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from heads.common.resolvers import ROOT, register_resolvers
from train.config import run_config
from train.distributed.processes import accelerator_for

# Of its own process: an allocator's settings and its state are the process's.
FRESH = """
import resource, torch
from train.distributed.processes import keep_freed

def fill():
    several = [torch.ones(2**21) for _ in range(8)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed()
fill()
before = faults()
for _ in range(5):
    fill()
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_memory_that_is_freed_is_taken_again() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], check=True, capture_output=True, text=True)
    pages = 5 * 8 * 2**23 // 4096
    assert int(done.stdout) < pages / 10


def test_each_run_of_a_process_has_its_own_precision() -> None:
    register_resolvers()
    for asked, expected in (("bf16", "bf16"), ("fp32", "no"), ("bf16", "bf16")):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            run = run_config(compose("train", [f"trainer.precision={asked}", "model.device=cpu"]))
        assert accelerator_for(run.launcher, run.trainer, run.model).mixed_precision == expected
