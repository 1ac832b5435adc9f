"""Which device a name stands for, as on a machine with GPUs."""

import pytest
import torch

from inference.target.config import device_named, use_device


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Return the devices that were made the current one, of a machine with four GPUs."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(made))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made[-1].index)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    return made


def test_a_gpu_has_the_index_that_tensors_there_have(current: list[torch.device]) -> None:
    assert [str(device_named(name)) for name in ("cuda", "cuda:2", "cpu")] == ["cuda:0", "cuda:2", "cpu"]
    assert str(use_device("cuda")) == "cuda:0"
    with pytest.raises(ValueError, match="cuda:4, and torch sees 4 accelerators"):
        use_device("cuda:4")
    assert not current


def test_a_gpu_that_is_named_is_the_one_that_a_single_process_works_on(current: list[torch.device]) -> None:
    assert use_device("cuda:3") == torch.device("cuda:3")
    assert current == [torch.device("cuda:3")]
    assert str(device_named("cuda")) == "cuda:3"
