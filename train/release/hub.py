"""A folder on the Hub: uploaded in one commit, downloaded again and compared; where that fails, nothing half is left.

Large files go first. A file that the Hub has already is not sent again, so that another call goes on where one broke
off; until the commit, which comes last, the branch is as it was. `HfApi.upload_folder` is not used: with hf_xet it may
commit several times.
"""

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from data.text.files import content_hash
from heads.formats.hub import TRANSPORT, hub_errors
from heads.formats.store import read_tensors

log = logging.getLogger(__name__)
T = TypeVar("T")

WAITS = (1, 4, 16)  # seconds before each further attempt, beside those of huggingface_hub's own for single requests
BUSY = (408, 429, 500, 502, 503, 504)  # statuses by which the Hub asks for another attempt
BARE = {".gitattributes"}  # the files of a repository to which nobody has committed
SHORT = 8  # characters of a commit that people read
MESSAGE = "Publish the head with headstart"


class Place(NamedTuple):
    """A repository as this call found it, or made it.

    Attributes:
        repo: its name.
        commit: the branch's last commit before anything is uploaded.
        made: whether this call made the repository, which nobody has committed to.
    """

    repo: str
    commit: str
    made: bool


@contextmanager
def place(repo: str, private: bool, tag: str | None, api: HfApi) -> Iterator[Place]:
    """Give the repository until the block ends; one that was made here is deleted again if an upload fails for good.

    Raises:
        ValueError: the token is refused or may only read, the name is taken, the repository is public where a private
            one is wanted, or has the tag; and what the block raises, with what became of the repository.
    """
    _check_token(repo, api)
    with hub_errors(repo, "looking for the repository"):
        there = lasting(lambda: _info(repo, api))
        tags = lasting(lambda: api.list_repo_refs(repo).tags) if there and tag else []
    if any(each.name == tag for each in tags):
        raise ValueError(f"{repo}: has a tag {tag} already, nothing was uploaded; give another tag=…")
    if there is None:
        with hub_errors(repo, "creating the repository"):
            # exist_ok: a first attempt whose answer was lost has made it, or another call just now.
            lasting(lambda: api.create_repo(repo, private=private, exist_ok=True))
            info = lasting(lambda: api.model_info(repo))
    else:
        info = there
    empty = {each.rfilename for each in info.siblings or []} <= BARE
    found = Place(repo, str(info.sha), there is None and empty)
    try:
        if private and not info.private:
            raise ValueError(f"{repo}: the repository is public; make it private on the Hub, or say private=false")
        yield found
    except ValueError as error:
        raise ValueError(f"{error}; {_undone(found, api)}") from error


def push(folder: Path, into: Place, ours: Callable[[str], bool], api: HfApi) -> str:
    """Upload a folder in one commit, and return that.

    Args:
        folder: what the branch shall hold.
        into: where.
        ours: which of the branch's files are taken away if the folder has them not, such as an earlier head's report.
        api: the Hub.

    Raises:
        ValueError: the Hub refuses, cannot be reached for some time, or someone else commits meanwhile.
    """
    names = files_of(folder)
    adds = [CommitOperationAdd(name, str(folder / name)) for name in names]

    def commit() -> str:
        now = str(api.repo_info(into.repo).sha)
        if now != into.commit:
            if _holds(now, folder, into.repo, api):  # an attempt before this one, whose answer was lost
                return now
            raise ValueError(f"{into.repo}: someone else has committed to it, {now[:SHORT]}; publish again")
        stale = [name for name in api.list_repo_files(into.repo, revision=now) if ours(name) and name not in names]
        wanted: list[Any] = [*(CommitOperationDelete(name) for name in stale), *adds]
        done = api.create_commit(into.repo, wanted, commit_message=MESSAGE, parent_commit=now)
        return str(done.oid)

    with hub_errors(into.repo, "uploading"):
        lasting(lambda: api.preupload_lfs_files(into.repo, adds, free_memory=False))
        return lasting(commit)


def download(folder: Path, back: Path, repo: str, commit: str, api: HfApi) -> None:
    """Download a commit and compare every file and every tensor with the folder.

    Args:
        folder: what was uploaded.
        back: where to download to.
        repo: from where.
        commit: which.
        api: the Hub.

    Raises:
        ValueError: the download fails, or something came back different.
    """
    with hub_errors(repo, "downloading for verification"):
        names = files_of(folder)
        lasting(lambda: api.snapshot_download(repo, revision=commit, local_dir=back, allow_patterns=names))
    for name in names:
        if not (back / name).is_file() or content_hash(back / name) != content_hash(folder / name):
            raise ValueError(f"{repo}: {name} came back different from what was uploaded")
    ours, theirs = read_tensors(folder), read_tensors(back)
    equal = ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )
    if not equal:
        raise ValueError(f"{repo}: the head came back different from what was uploaded")


def set_tag(repo: str, tag: str, commit: str, api: HfApi) -> None:
    """Give a commit a tag.

    Raises:
        ValueError: the Hub refuses, or cannot be reached for some time, or another commit got the tag meanwhile.
    """
    with hub_errors(repo, f"setting the tag {tag}"):
        # exist_ok: an attempt whose answer was lost has set it.
        lasting(lambda: api.create_tag(repo, tag=tag, revision=commit, exist_ok=True))
        at = str(lasting(lambda: api.repo_info(repo, revision=tag)).sha)
    if at != commit:
        raise ValueError(
            f"{repo}: stands at {commit[:SHORT]}, but someone else has set the tag {tag} at {at[:SHORT]}; publish "
            "again with another tag=…"
        )


def lasting(call: Callable[[], T]) -> T:
    """Call, and again after a while where the connection was lost or the Hub was busy."""
    for wait in WAITS:
        try:
            return call()
        except (TRANSPORT, OSError, RuntimeError) as error:
            if not _passing(error):
                raise
            log.warning("the connection to the Hub broke off (%s); again in %d s", type(error).__name__, wait)
            time.sleep(wait)
    return call()


def files_of(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its sub-folders, as a repository calls them."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def one_of(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return whether a file's name fits one of the patterns."""
    return lambda name: any(fnmatch(name, pattern) for pattern in patterns)


@contextmanager
def downloaded(folder: Path, repo: str, commit: str, api: HfApi) -> Iterator[Path]:
    """Give a commit's files, compared with the folder as `download` does, until the block ends."""
    with tempfile.TemporaryDirectory() as temporary:
        download(folder, Path(temporary), repo, commit, api)
        yield Path(temporary)


def _check_token(repo: str, api: HfApi) -> None:
    """Refuse a token that the Hub does not know, or that may only read, before anything is made."""
    with hub_errors(repo, "checking the token"):
        who: dict[str, Any] = lasting(api.whoami)
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise ValueError(
            f"{repo}: the token of {who.get('name')} may only read; make one that may write on the Hub's page of "
            "settings, and log in with `hf auth login` or set HF_TOKEN"
        )


def _info(repo: str, api: HfApi) -> Any:
    try:
        return api.repo_info(repo)
    except RepositoryNotFoundError:
        return None


def _passing(error: Exception) -> bool:
    """Whether another attempt may go well."""
    answered = error if isinstance(error, HfHubHTTPError) else error.__cause__
    return not isinstance(answered, HfHubHTTPError) or answered.response.status_code in BUSY


def _holds(commit: str, folder: Path, repo: str, api: HfApi) -> bool:
    """Whether a commit holds every file of the folder as it is here."""
    tree = api.list_repo_tree(repo, recursive=True, revision=commit)
    there = {each.path: each for each in tree if isinstance(each, RepoFile)}
    return all(name in there and _same(folder / name, there[name]) for name in files_of(folder))


def _same(path: Path, there: RepoFile) -> bool:
    if there.lfs is not None:
        return bool(there.lfs.sha256 == content_hash(path))
    data = path.read_bytes()
    return bool(there.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())  # as git names it


def _undone(found: Place, api: HfApi) -> str:
    """Delete a repository that this call has made and committed nothing to; return what became of it."""
    try:
        now = str(lasting(lambda: api.repo_info(found.repo)).sha)
        if now != found.commit:
            return f"the repository stands at {now[:SHORT]}, which may be whole: publish again to verify it"
        if not found.made:
            return f"the repository stands at {now[:SHORT]} as before"
        lasting(lambda: api.delete_repo(found.repo, missing_ok=True))
    except (TRANSPORT, OSError, RuntimeError):
        if found.made:
            return "the repository that this call made could not be deleted: delete it on the Hub, or publish again"
        return f"how the repository stands cannot be asked; before, it was {found.commit[:SHORT]}"
    return "the repository that this call made is deleted again"
