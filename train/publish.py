"""Publish a run's head: a folder with head, card and report, pushed to the Hub and verified by a download.

python train/publish.py run=outputs/NAME repo=OWNER/NAME
"""

import json
import shlex
import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root instead of train/, whose files could shadow modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Callable

from huggingface_hub import HfApi, get_token
from omegaconf import DictConfig

from heads.common.command import command
from heads.common.connection import unreachable
from heads.common.errors import report_on_interrupt
from heads.common.files import last_good
from heads.common.typed import typed
from heads.common.untrusted import visible
from heads.formats.hub import hub_errors, resolve_head, target_path
from heads.formats.published.files import config_of
from heads.formats.published.openvino import convert
from heads.formats.store import read_config
from train.release.config import CHECKPOINT, OPENVINO, PublishConfig
from train.release.folder import FILES, copy_with_head, write_folder, write_format
from train.release.hub import SHORT, downloaded, files_of, push, repository, trial_of

__all__ = ["PublishConfig", "publish"]


def publish(config: PublishConfig, api: HfApi, say: Callable[[str], object] = print) -> Path:
    """Write the folder and, unless `dry_run`, push and verify it; return it. Refuse a run without a head."""
    run, repo = Path(config.run).expanduser(), config.repo
    out = Path(config.out).expanduser() if config.out else run / "publish"
    whole = last_good(run / "head").is_dir()
    if config.format == CHECKPOINT:
        adapter = copy_with_head(last_good(run / "head") if whole else resolve_head(config.run), out, config)
        beside = "" if adapter is None else f", which drafts for {adapter}: serve that adapter with it"
        say(f"{out}: the target with this head as its MTP module{beside}")
        speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
        say(f"vLLM: {shlex.join(['vllm', 'serve', str(out), '--speculative-config', speculative])}")
        return out
    if not whole:  # a published head, such as another project's, is only written in a format
        if None in (config.format, config.target, config.out) or not config.dry_run:
            raise ValueError(
                f"run={config.run}: it holds no head/; give the folder of a run, trained to its first evaluation, or a "
                "published head with format, target, out and dry_run=true"
            )
        write_format(resolve_head(config.run), config, str(config.target), None, out)
        say(f"{out}: {', '.join(files_of(out))}")
        if config.format == OPENVINO:
            convert(out, config_of(out), str(config.target), say)
        return out
    if not config.dry_run and not (api.token or get_token()):
        raise ValueError(f"{repo}: no token for the Hub; run `hf auth login`, set HF_TOKEN or dry_run=true")
    shown = write_folder(run, out, config)
    if config.format == OPENVINO:
        model = read_config(last_good(run / "head"))["target"]["name"]
        convert(out, shown["served"], config.target or target_path(model), say)
    say(f"{out}: {', '.join(files_of(out))}")
    say(f"how to serve it: {out / 'README.md'}")
    for drawback in shown["drawbacks"]:
        print(visible(f"warning: {repo}: {drawback}"), file=sys.stderr)
    if config.dry_run:
        target = "" if shown["hub"] else f", and the target's folder where it says {shown['path']}"
        say(f"dry_run: nothing was uploaded; where that card says {repo} give {out}{target}")
        return out
    if why := unreachable():  # before anyone waits for an upload
        raise ValueError(f"{repo}: {why}")
    trial = trial_of(run, config)
    if callable(trial) and (config.format or config.base):  # an exported head is tried before it is uploaded
        remedy = "; nothing was uploaded, publish without format and base, or with dtype=float32"
        trial(out, f"{out}: the written head drafts otherwise than it was trained", remedy)
    stopped = f"{repo} has the whole commit or nothing of it; the same command publishes again"
    with report_on_interrupt(lambda: stopped), repository(repo, config.private, config.tag, api) as before:
        commit = push(out, repo, before, FILES, api)
    try:
        with downloaded(out, repo, commit, api) as back:
            complaint = f"{repo}: the head that came back drafts otherwise"
            tau = trial(back, complaint) if callable(trial) else f"τ was not verified: {trial}"
    except ValueError as error:
        raise ValueError(
            f"{error}; {repo} is now at {commit}, and was at {before}: publish again, or take it down on the Hub"
        ) from error
    tagged = ""
    if config.tag is not None:
        tagged = f", tag {config.tag}"
        with hub_errors(repo, f"setting the tag {config.tag}"):
            api.create_tag(repo, tag=config.tag, revision=commit)
    say(f"published as {repo} at {commit[:SHORT]}{tagged}, downloaded again and equal in every file and tensor; {tau}")
    return out


@command("publish")
def main(cfg: DictConfig) -> None:
    """Run the command."""
    publish(typed(PublishConfig, cfg), HfApi(library_name="headstart"))


if __name__ == "__main__":
    main()
