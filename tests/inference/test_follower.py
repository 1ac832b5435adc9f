"""A second model's cache: level by level against fresh passes, and along a text that is revised."""

import pytest
import torch

from inference.drafters.runner import DraftModelRunner
from tests import toys


@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_level_passes_equal_sequential_passes(name: str) -> None:
    model, close = toys.target(name, torch.float64), 1e-5 if name == "gemma2" else 1e-9
    runner = DraftModelRunner(model)
    prompt = toys.prompt(3, 12)
    found = [runner.read(prompt)]
    levels = [([4, 9], [0, 0]), ([1, 7, 1], [0, 0, 1]), ([5], [2])]
    paths, expected = [prompt], []
    for token, parent in levels:
        found.append(runner.expand(torch.tensor(token), torch.tensor(parent)))
        paths = [[*paths[p], t] for p, t in zip(parent, token, strict=True)]
        expected.append([model.prefill(torch.tensor(path), model.cache()).logits for path in paths])
    for level, alone in zip(found[1:], expected, strict=True):
        torch.testing.assert_close(level, torch.cat([row[0] for row in alone]), rtol=close, atol=close)
    # A path stands: 9, 1 and 5 are kept, and reading on equals a fresh pass.
    after = [*prompt, 9, 1, 5, 2, 3]
    logits = runner.read(after)
    fresh = model.prefill(torch.tensor(after), model.cache()).logits
    assert fresh is not None
    torch.testing.assert_close(logits, fresh[0], rtol=close, atol=close)


def test_a_text_is_revised_anywhere() -> None:
    model = toys.target("llama", torch.float64)
    runner = DraftModelRunner(model)
    texts = [[3, 1, 4, 1, 5], [3, 1, 4, 1, 5], [3, 1, 9, 2], [3, 1], [7], [7, 3, 1, 4], [7, 3, 1, 4, 9, 9]]
    for seen in texts:
        logits, fresh = runner.read(seen), model.prefill(torch.tensor(seen), model.cache()).logits
        assert fresh is not None
        torch.testing.assert_close(logits, fresh[0])
        runner.expand(torch.tensor([8]), torch.tensor([0]))
