"""What several files of these tests take."""

from tests.eval.small import runs

__all__ = ["runs"]
