"""Where a head is found: in a run's folder, in a published folder, or on the Hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from heads.errors import one_line
from heads.resolvers import ROOT
from heads.store import CONFIG, WEIGHTS, last_good

REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")

# The base of the transport's errors: huggingface_hub has changed its HTTP library before, this relation holds in both.
TRANSPORT: Any = HfHubHTTPError.__bases__[0]


def resolve_head(run_or_repo: str) -> Path:
    """Return the folder of a head, ready for `load_head`.

    Args:
        run_or_repo: a run's folder, a published folder, or a Hub id OWNER/NAME, which is downloaded.

    Raises:
        ValueError: there is no head, or the Hub does not give it.
    """
    path = Path(run_or_repo).expanduser()
    if path.is_dir():
        for folder in (path / "head", path):
            if (last_good(folder) / CONFIG).is_file():
                return folder
        raise ValueError(f"{path}: no head in it, neither head/{CONFIG} nor {CONFIG}; let its training save one")
    if (path.parent.is_dir() and path.parent != Path()) or not REPO.fullmatch(run_or_repo):
        raise ValueError(f"{path}: no such folder; give a run's or published folder, or a Hub id OWNER/NAME")
    with hub_errors(run_or_repo, "downloading"):
        return Path(HfApi().snapshot_download(run_or_repo, allow_patterns=[CONFIG, WEIGHTS, "config.yaml"]))


def on_hub(name: str) -> bool:
    """Say whether a model's name is a Hub id and not a folder of some machine."""
    return REPO.fullmatch(name) is not None and not Path(target_path(name)).exists()


def target_path(name: str) -> str:
    """Return where to load a head's target from: a published head names the embedded one relative to the checkout."""
    inside = ROOT / name
    return str(inside) if inside.is_dir() and not Path(name).exists() else name


@contextmanager
def hub_errors(repo: str, doing: str) -> Iterator[None]:
    """Turn what the Hub or the way to it raises into a ValueError of one line that says what to do."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            raise ValueError(
                f"{repo}: the Hub refused {doing} ({status}): no such repository, or the token lacks the right to it; "
                "log in with `hf auth login` or set HF_TOKEN"
            ) from error
        said = error.server_message or one_line(error)
        raise ValueError(f"{repo}: the Hub answered {status} while {doing} ({said}); try again later") from error
    except (TRANSPORT, OSError, RuntimeError) as error:
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {one_line(cause)}"
        raise ValueError(f"{repo}: {doing} broke off ({why}); check the connection and try again") from error
