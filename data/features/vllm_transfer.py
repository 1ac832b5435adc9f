"""Hidden states that a vLLM server writes to files in shared memory.

The reader is called from several threads with the server's reply. It removes the files that it has read, so that there
are no more than requests under way. A file that does not arrive whole in time is an EndpointError, a reply that names
none a ValueError.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from data.answers.client import EndpointError
from data.features.vllm_features import LOCK, STATES, TOKENS, lock_of, read_tensors
from heads.common.untrusted import inside

REQUEST = "headstart-"  # a request's name, which the name of its result holds, is this and a random number
SETUP = "start vLLM as docs/data_features.md has it"
Result = list[Tensor]  # tokens, and their states


class SharedFolder:
    """Reader of the files of vLLM's ExampleHiddenStatesConnector, from this machine's name for their folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_read = False  # whether a file has been found where the servers write

    def read(self, answer: dict[str, Any], seconds: float) -> Result:
        """Return and remove the tensors of a file, once it is written."""
        path = answer.get("hidden_states_path")
        if not isinstance(path, str):
            raise ValueError(f"features.vllm={self.folder}: a server's answer names no file of hidden states; {SETUP}")
        file = inside(self.folder, Path(path).name)
        if not (self.has_read or file.exists() or lock_of(file).exists()):
            raise ValueError(f"features.vllm={self.folder}: a server has written {path}, which is not there; {SETUP}")
        try:
            result = read_tensors(file, seconds, TOKENS, STATES)
            self.has_read = True
            return result
        except ValueError as error:
            raise EndpointError("file", str(error), retry=True) from error
        finally:
            _remove(file)
            _remove(lock_of(file))

    def sweep(self, requests: Collection[str]) -> set[str]:
        """Remove the files of requests that were given up, as far as they are there, and return these requests."""
        swept = set()
        for file in self.folder.glob(f"*{REQUEST}*") if requests else ():
            if (name := re.search(f"{REQUEST}[0-9a-f]{{32}}", file.name)) and name[0] in requests:
                _remove(file)
                if file.suffix != LOCK:  # behind which the result may still come
                    swept.add(name[0])
        return swept


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{file}: cannot be removed ({error.strerror}); run vLLM and the training as one user"
        ) from error
