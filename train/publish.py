"""Publish a run's head: one folder with head, card and report, pushed to the Hub and verified by downloading it again.

python train/publish.py run=outputs/NAME repo=OWNER/NAME
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root instead of train/, so that its files shadow no module
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Callable

from huggingface_hub import HfApi, get_token
from omegaconf import DictConfig

from heads.common.command import command
from heads.common.connection import check_connected
from heads.common.errors import keeping
from heads.common.files import last_good
from heads.common.typed import typed
from heads.common.untrusted import visible
from heads.formats.store import CONFIG, read_config
from train.release.card import Facts, misleading, of_checkpoint
from train.release.config import CHECKPOINT, PublishConfig
from train.release.folder import FILES, copy_with_head, write_folder
from train.release.hub import SHORT, Repository, downloaded, files_of, push, repository, set_tag
from train.release.trial import Trial, begin

__all__ = ["PublishConfig", "misleading", "publish"]


def publish(config: PublishConfig, api: HfApi, say: Callable[[str], object] = print) -> Path:
    """Write the folder and, unless `dry_run`, push and verify it; return the folder.

    Raises:
        ValueError: there is no run or no head, the Hub refuses or cannot be reached, or the download is different: one
            line that gives the state of the repository.
    """
    run = Path(config.run).expanduser()
    out = Path(config.out).expanduser() if config.out else run / "publish"
    if not run.is_dir():
        others = sorted(path.parent.parent.name for path in run.parent.glob("*/head/config.json"))
        there = f"; runs with a head there: {', '.join(others)}" if others else ""
        raise ValueError(f"run={run}: no such folder{there}")
    if (run / CONFIG).is_file():
        raise ValueError(f"run={run}: that is a head's folder; give the folder of the run that trained it")
    if not last_good(run / "head").is_dir():
        raise ValueError(f"run={run}: it holds no head/; train it to its first evaluation, or name another run")
    if not config.dry_run and not (api.token or get_token()):
        raise ValueError(f"{config.repo}: no token for the Hub; run `hf auth login`, set HF_TOKEN or dry_run=true")
    if config.format == CHECKPOINT:
        _warn(str(out), copy_with_head(run, out, config))
        say(f"{out}: the target with this head as its MTP module")
        for engine, line in of_checkpoint(out):
            say(f"{engine}: {line}")
        return out
    facts = write_folder(run, out, config)
    say(f"{out}: {', '.join(files_of(out))}")
    say(f"how to serve it: {out / 'README.md'}")
    if remark := misleading(config.repo, read_config(last_good(run / "head"))["head"]["name"]):
        say(remark)
    _warn(config.repo, facts)
    if config.dry_run:
        target = "" if facts.hub else f", and the target's folder where it says {facts.path}"
        say(f"dry_run: nothing was uploaded; where that card says {config.repo} give {out}{target}")
        return out
    check_connected(config.repo)
    trial: Trial | str = "reverify=false"
    if config.reverify:
        trial = begin(run, config)
        if isinstance(trial, Trial) and not trial.exact:  # decode with an exported one too, before it is uploaded
            remedy = "; nothing was uploaded, publish without format and base, or with dtype=float32"
            trial.check(out, f"{out}: the written head drafts otherwise than it was trained", remedy)
    stopped = f"{config.repo} has the whole commit or nothing of it; the same command publishes again"
    with keeping(lambda: stopped), repository(config.repo, config.private, config.tag, api) as repo:
        commit = push(out, repo, FILES, api)
    checked = _verified(out, repo, commit, trial, api) if config.reverify else ", not verified: reverify=false"
    if config.tag is not None:
        set_tag(config.repo, config.tag, commit, api)
    tagged = f", tag {config.tag}" if config.tag else ""
    say(f"published as {config.repo} at {commit[:SHORT]}{tagged}{checked}")
    return out


def _warn(name: str, facts: Facts) -> None:
    """Print what the run's own report says against the head."""
    if facts.drawbacks:
        print(visible(f"warning: {name}: {' '.join(facts.drawbacks)}"), file=sys.stderr)


def _verified(out: Path, repo: Repository, commit: str, trial: Trial | str, api: HfApi) -> str:
    """Download the commit, compare it and decode with it; return a message of the result.

    Raises:
        ValueError: something is different.
    """
    complaint = f"{repo.name}: the head that came back drafts otherwise"
    try:
        with downloaded(out, repo.name, commit, api) as back:
            tau = trial.check(back, complaint) if isinstance(trial, Trial) else f"τ was not verified: {trial}"
    except ValueError as error:
        before = "it was new" if repo.created else f"before, it was {repo.commit}"
        raise ValueError(
            f"{error}; the repository stands at {commit}, {before}: publish again, or take it down on the Hub"
        ) from error
    return f", downloaded again and equal in every file and tensor; {tau}"


@command("publish")
def main(cfg: DictConfig) -> None:
    """Run the command."""
    publish(typed(PublishConfig, cfg), HfApi(library_name="headstart"))


if __name__ == "__main__":
    main()
