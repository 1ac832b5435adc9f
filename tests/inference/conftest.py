"""What the tests of several draft sources share."""

import pytest

from tests import assistants, toys


@pytest.fixture(scope="session")
def near(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that agrees with the toy target often, not always."""
    model = assistants.noisy(toys.target().model, 0.02)
    return assistants.save(model, toys.tokenizer(), tmp_path_factory.mktemp("near"))
