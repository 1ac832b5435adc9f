"""Upload of a folder to the Hub in one commit, and verification by download.

Files that the Hub has already are not sent again, so that another call continues an interrupted one; until the commit,
which comes last, the branch is unchanged. `HfApi.upload_folder` is not used: with hf_xet it may commit several times.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._paths import filter_repo_objects

from data.text.files import content_hash
from heads.common.connection import TRANSPORT
from heads.common.progress import waiting
from heads.formats.hub import hub_errors

log = logging.getLogger(__name__)
T = TypeVar("T")

WAITS = (1, 4, 16)  # seconds before each further attempt, next to those of huggingface_hub's own for single requests
BUSY = (408, 429, 500, 502, 503, 504)  # statuses after which another attempt may succeed
SHORT = 8  # characters of a commit in messages
MESSAGE = "Publish the head with headstart"


def find_or_create(repo: str, private: bool, tag: str | None, api: HfApi) -> str:
    """Find or create the repository, and return its last commit.

    Raises:
        ValueError: the Hub refuses the token or the name, the repository is public despite `private`, or has the tag.
    """
    with hub_errors(repo, "looking for the repository"):
        info: Any = retried(lambda: api.repo_info(repo) if api.repo_exists(repo) else None)
        tags = retried(lambda: api.list_repo_refs(repo).tags) if info and tag else []
    if any(ref.name == tag for ref in tags):
        raise ValueError(f"{repo}: has a tag {tag} already, nothing was uploaded; give another tag=…")
    if info is None:
        with hub_errors(repo, "creating the repository"):
            # exist_ok: a first attempt whose response was lost has created it, or another call just now.
            retried(lambda: api.create_repo(repo, private=private, exist_ok=True))
            info = retried(lambda: api.model_info(repo))
    if private and not info.private:
        raise ValueError(f"{repo}: the repository is public; make it private on the Hub, or say private=false")
    return str(info.sha)


def push(folder: Path, repo: str, before: str, ours: Sequence[str], api: HfApi) -> str:
    """Upload a folder in one commit behind the commit `before`, and return it.

    Files of the branch that match the patterns `ours` and that the folder lacks, such as an earlier head's report, are
    deleted.

    Raises:
        ValueError: the Hub refuses, cannot be reached for some time, or someone else commits meanwhile.
    """
    names = files_of(folder)

    def commit() -> str:
        there = filter_repo_objects(api.list_repo_files(repo, revision=before), allow_patterns=list(ours))
        operations: list[Any] = [CommitOperationDelete(name) for name in there if name not in names]
        operations += [CommitOperationAdd(name, str(folder / name)) for name in names]
        return str(api.create_commit(repo, operations, commit_message=MESSAGE, parent_commit=before).oid)

    size = sum((folder / name).stat().st_size for name in names)
    with waiting(f"uploading {size / 1e6:,.0f} MB to {repo}"), hub_errors(repo, "uploading"):
        return retried(commit)


@contextmanager
def downloaded(folder: Path, repo: str, commit: str, api: HfApi) -> Iterator[Path]:
    """Within the block, provide a commit's downloaded files, each checked against the uploaded file."""
    with tempfile.TemporaryDirectory() as temporary:
        back, names = Path(temporary), files_of(folder)
        with waiting(f"downloading {repo} again"), hub_errors(repo, "downloading for verification"):
            retried(lambda: api.snapshot_download(repo, revision=commit, local_dir=back, allow_patterns=names))
        for name in names:
            if not (back / name).is_file() or content_hash(back / name) != content_hash(folder / name):
                raise ValueError(f"{repo}: {name} came back different from what was uploaded")
        yield back


def retried(call: Callable[[], T]) -> T:
    """Call the function; retry after a while if the connection is lost or the Hub is busy."""
    for wait in WAITS:
        try:
            return call()
        except (TRANSPORT, OSError, RuntimeError) as error:
            answered = error if isinstance(error, HfHubHTTPError) else error.__cause__
            if isinstance(answered, HfHubHTTPError) and answered.response.status_code not in BUSY:
                raise
            log.warning("the connection to the Hub broke off (%s); again in %d s", type(error).__name__, wait)
            time.sleep(wait)
    return call()


def files_of(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its sub-folders, as a repository calls them."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
