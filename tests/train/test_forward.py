"""What stands for another command passes on what it is told."""

import os
import signal
import sys
import threading

from train import forward


def test_a_status_is_passed_back() -> None:
    assert forward.run([sys.executable, "-S", "-c", "raise SystemExit(3)"]) == 3


def test_sigterm_is_passed_on() -> None:
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    assert forward.run(["sleep", "60"]) == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
