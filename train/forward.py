"""A command that stands for another one: what it is told, the other is told."""

import signal
import subprocess

STOPPED = 128 + signal.SIGTERM


def run(words: list[str]) -> int:
    """Run a command, pass SIGTERM on to it, and return its exit status, 143 where it was told to stop.

    Launchers report any end of their processes but 0 as a failure of their own, with a status of their own.
    """
    told = False

    def pass_on(number: int, _: object) -> None:
        nonlocal told
        told = True
        job.send_signal(number)

    with subprocess.Popen(words) as job:
        previous = signal.signal(signal.SIGTERM, pass_on)
        try:
            status = job.wait()
        except BaseException:
            job.kill()
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)
    return STOPPED if told and status else status
