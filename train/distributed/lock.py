"""A lock on the output folder, for one run at a time; the kernel releases it when its holder exits, even if killed."""

import json
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from data.features.store_files import claim, write_whole

LOCK, OWNER = ".lock", ".owner.json"


class RunLock(ExitStack):
    """The lock of a run's folder, held from `take` to the end of the block."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out, self.held = out, False

    def take(self) -> None:
        """Take the lock unless it is held already or the folder does not exist.

        Raises:
            ValueError: another process holds it; the message names it.
        """
        if self.held or not self.out.is_dir():
            return
        if not self.enter_context(claim(self.out / LOCK, wait=False)):
            raise ValueError(
                f"{self.out}: another run writes to it, {self._owner()}; wait for its end, stop it, or give another "
                "name=…"
            )
        self.held = True
        owner = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        write_whole(self.out / OWNER, (json.dumps(owner) + "\n").encode())

    def _owner(self) -> str:
        try:
            owner = json.loads((self.out / OWNER).read_text())
        except (OSError, ValueError):  # it has just begun
            return "started this moment"
        return f"process {owner['process']} on {owner['host']} since {owner['since']}"
