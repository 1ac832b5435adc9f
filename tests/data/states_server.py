"""A server that answers as vLLM's does with its connector of hidden states: a toy target computes them.

For each request it locks FILE.lock, replies, and writes FILE a moment later; then it lets go of the lock.
"""

import fcntl
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import save_file
from torch import Tensor

from inference.target.target import Target
from tests.data.chat_server import MODEL, Handler, Server

Content = dict[str, Tensor]
Write = Callable[[Path, Content], None]  # writes a file


def document(target: Target, token: Sequence[int], ids: Sequence[int]) -> Content:
    """Return what vLLM writes of a document: the states after so many decoder layers, without the final norm."""
    tokens = torch.tensor(token)
    layers = tuple(range(target.spec.num_layers))
    features = target.features(tokens[None], torch.zeros(1, len(tokens), dtype=torch.long), layers)
    states = [target.embeddings.embed(tokens), *features.hidden[0].unbind(1)]
    return {"token_ids": tokens, "hidden_states": torch.stack([states[i] for i in ids], 1)}


def whole(file: Path, content: Content) -> None:
    """Write the file as it should be."""
    save_file(content, file)


def none(file: Path, content: Content) -> None:
    """Write nothing, as where the disk is full."""


def torn(file: Path, content: Content) -> None:
    """Write half a file."""
    save_file(content, file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def late(seconds: float) -> Write:
    """Write after a while."""

    def write(file: Path, content: Content) -> None:
        time.sleep(seconds)
        save_file(content, file)

    return write


def changed(**tensors: Callable[[Tensor], Tensor]) -> Write:
    """Write other tensors."""
    return lambda file, content: save_file(
        {name: tensors.get(name, torch.clone)(tensor).contiguous() for name, tensor in content.items()}, file
    )


class StatesServer(Server):
    """The server. `writes` says how the next files are written, as `always_writes` where it has ended."""

    def __init__(self, target: Target, folder: Path, ids: Sequence[int]) -> None:
        super().__init__()
        self.target, self.folder, self.ids = deepcopy(target), folder, ids  # a target runs in one thread at a time
        self.writes: list[Write] = []
        self.always_writes: Write = whole
        self.named: Callable[[Path], dict[str, Any]] = lambda file: {"hidden_states_path": str(file)}
        folder.mkdir(exist_ok=True)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request, and begin to write its file."""
        prompt = body["prompt"]
        file = self.folder / f"cmpl-{body['request_id']}-0-{len(self.bodies):08x}.safetensors"
        with self.lock:
            content = document(self.target, prompt, self.ids)
            last = self.target.features(torch.tensor([prompt]), torch.zeros(1, len(prompt)).long(), ()).last_hidden
            token = int(self.target.embeddings.logits(last[0, -1]).argmax())
            write = self.writes.pop(0) if self.writes else self.always_writes
            lock = file.with_name(f"{file.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self.write, args=(write, file, content, lock), daemon=True).start()
        choice = {"text": "", "token_ids": [token] if body["return_token_ids"] else None}
        return {"model": MODEL, "choices": [choice], "kv_transfer_params": self.named(file)}

    def write(self, write: Write, file: Path, content: Content, lock: TextIO) -> None:
        """Write a file, and let go of its lock."""
        write(file, content)
        lock.close()

    def leftovers(self) -> list[str]:
        """Return the names of all files that are there."""
        return sorted(file.name for file in self.folder.iterdir())


def unanswered(handler: Handler, reply: dict[str, Any]) -> None:
    """Hang until the server ends, though the file is written."""
    handler.server.over.wait(20)
    handler.close_connection = True
