"""What a process of a run does about its machine."""

import subprocess
import sys

import pytest

# Of its own process: an allocator's settings and its state are the process's.
FRESH = """
import resource, torch
from train.processes import keep_freed

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
