"""Upload of a folder to the Hub in one commit, and its verification: by download, and by a trial of the head.

Files that the Hub already has are not sent again, so another call continues an interrupted upload. The commit comes
last; until then the branch is unchanged. `HfApi.upload_folder` is not used: with hf_xet it may commit several times.

In a trial the head must accept the drafts that the run's own head accepts, on a few prompts. Decoding is greedy, with
the head's own tree, or a chain for a format without trees. An export is tried before the upload, and every head again
after the download.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, try_to_load_from_cache
from huggingface_hub.utils._paths import filter_repo_objects

from data.text.files import content_hash
from data.text.prompts import load_prompts
from eval.inputs.drafters import own_prompts
from eval.measures import metrics
from heads.base import Tokens
from heads.common.connection import TRANSPORT
from heads.common.errors import one_line
from heads.common.files import last_good
from heads.common.progress import progress
from heads.common.typed import typed
from heads.formats.hub import hub_errors, load_found, on_hub, target_path
from heads.formats.store import read_config
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig, check_tree
from inference.target.config import DTYPES
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.release.config import PublishConfig

SHORT = 8  # characters of a commit hash in messages
MESSAGE = "Publish the head with headstart"


@contextmanager
def repository(repo: str, private: bool, tag: str | None, api: HfApi) -> Iterator[str]:
    """Find or create the repository, and provide its last commit; a new repository is deleted if the block fails.

    Refuse what the Hub refuses, a public repository despite `private`, and a tag that is there.
    """
    with hub_errors(repo, "looking for the repository"):
        there = api.repo_exists(repo)
        taken = bool(there and tag) and tag in [ref.name for ref in api.list_repo_refs(repo).tags]
    if taken:
        raise ValueError(f"{repo}: has a tag {tag} already, nothing was uploaded; give another tag=…")
    with hub_errors(repo, "asking for the repository" if there else "creating the repository"):
        if not there:
            api.create_repo(repo, private=private, exist_ok=True)
        before = api.model_info(repo)
    if private and not before.private:
        raise ValueError(f"{repo}: the repository is public; make it private on the Hub, or say private=false")
    try:
        yield str(before.sha)
    except ValueError:
        with suppress(TRANSPORT, OSError, RuntimeError):  # errors of a Hub that does not answer
            if not there and api.model_info(repo).sha == before.sha:
                api.delete_repo(repo, missing_ok=True)
        raise


def push(folder: Path, repo: str, before: str, ours: Sequence[str], api: HfApi) -> str:
    """Upload a folder in one commit behind the commit `before`, and return it; refuse another commit meanwhile.

    Files that match the patterns `ours` and that the folder lacks, such as an earlier head's report, are deleted.
    """
    names = files_of(folder)
    with hub_errors(repo, "uploading"):
        there = filter_repo_objects(api.list_repo_files(repo, revision=before), allow_patterns=list(ours))
        operations: list[Any] = [CommitOperationDelete(name) for name in there if name not in names]
        operations += [CommitOperationAdd(name, str(folder / name)) for name in names]
        return str(api.create_commit(repo, operations, commit_message=MESSAGE, parent_commit=before).oid)


@contextmanager
def downloaded(folder: Path, repo: str, commit: str, api: HfApi) -> Iterator[Path]:
    """Provide a commit's downloaded files for the block, each checked against the uploaded file."""
    with tempfile.TemporaryDirectory() as temporary:
        back, names = Path(temporary), files_of(folder)
        with hub_errors(repo, "downloading for verification"):
            api.snapshot_download(repo, revision=commit, local_dir=back, allow_patterns=names)
        for name in names:
            if not (back / name).is_file() or content_hash(back / name) != content_hash(folder / name):
                raise ValueError(f"{repo}: {name} came back different from what was uploaded")
        yield back


def files_of(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its sub-folders, as paths in a repository."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


SLACK = 0.05  # relative difference of τ: a format may round the product of two of the head's matrices


def decoded(target: Target, head: Any, tree: TreeConfig, prompts: list[Tokens], tokens: int) -> list[Generation]:
    """Return the greedy answers to prompts, at most `tokens` tokens each, with a head's drafts."""
    drafter = HeadDrafter(head.to(device=target.device, dtype=target.dtype).eval(), tree, "head")
    settings = RequestParams(tokens, GREEDY)
    return [speculate(target, drafter, prompt, settings) for prompt in progress(prompts, "decoding")]


def trial_of(run: Path, config: PublishConfig) -> Callable[..., str] | str:
    """Return a function that checks a written head, or why this machine cannot; refuse another target's head.

    The check decodes with the head of a folder and returns a message about its τ. Other tokens or another τ than those
    of the run's own head raise a ValueError of one line, between a complaint and a remedy.
    """
    head, file = last_good(run / "head"), own_prompts(str(run))
    if not config.verify_prompts:
        return "verify_prompts=0"
    if file is None:
        return "the run holds no prompts.jsonl"
    content = read_config(head)
    path = config.target or target_path(content["target"]["name"])
    if on_hub(path) and not isinstance(try_to_load_from_cache(path, "config.json"), str):  # no download for a trial
        return f"{path} is not on this machine; give target=FOLDER of it"
    try:
        target = Target.load(path, adapter=content["target"].get("adapter"))
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        return f"the target cannot be loaded here ({one_line(error)})"
    trained, tree = load_found(head, target.embeddings, target.spec), typed(TreeConfig, content["tree"])
    if config.format is not None:
        trained, tree = trained.to(dtype=DTYPES[config.dtype]), TreeConfig("chain", config.draft_tokens, 0, 0, [], [])
    check_tree(target, tree, "head")
    prompts = [prompt.token for prompt in load_prompts(file, target.tokenizer, config.verify_prompts)]
    prompts = [token for token in prompts if len(token) < target.max_model_len - 1]
    reference = decoded(target, trained, tree, prompts, config.verify_tokens)

    def check(folder: Path, complaint: str, remedy: str = "") -> str:
        head = load_found(folder, target.embeddings, target.spec)
        generations = decoded(target, head, tree, prompts, config.verify_tokens)
        tau, before = (metrics.acceptance(results).tau or 0.0 for results in (generations, reference))
        same = [result.tokens for result in generations] == [result.tokens for result in reference]
        if not same or abs(tau - before) > SLACK * before:
            what = "τ is" if same else "other tokens came out, τ is"
            raise ValueError(f"{complaint}, {what} {tau:.2f} by it, and {before:.2f} by the run's own head{remedy}")
        return f"τ {tau:.2f} over {len(prompts)} prompts, greedy by {tree.label}, as the run's own head"

    return check
