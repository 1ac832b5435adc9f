"""vLLM's connector of hidden states for its CPU build: vLLM's own one copies by CUDA's streams, to pinned memory.

Imported by vLLM alone: `kv_connector_module_path` names this file's module.
"""

from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


class Done:
    """A CUDA event of what has happened already."""

    def record(self, *_: Any) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """Return true."""
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The connector, which copies at once."""

    def _submit_async_write(self, pending: Any) -> None:
        empty = torch.empty_like
        with patch.object(torch.cuda, "Event", Done), patch.object(torch, "empty_like", lambda x, **_: empty(x)):
            super()._submit_async_write(pending)
