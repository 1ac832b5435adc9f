"""What several files of these tests take."""

from tests.eval.small import runs
from tests.ops.serving import log, plain, served

__all__ = ["log", "plain", "runs", "served"]
