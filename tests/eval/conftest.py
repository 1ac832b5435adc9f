"""What several files of these tests take."""

from tests.eval.serving import log, plain, served
from tests.eval.small import runs

__all__ = ["log", "plain", "runs", "served"]
