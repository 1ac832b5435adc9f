"""Finding and loading a head from a run's folder, a published folder or the Hub."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from torch import nn

from heads import HEADS
from heads.base import Embeddings, HeadConfig
from heads.common.connection import TRANSPORT, check_reachable
from heads.common.errors import one_line
from heads.common.files import last_good
from heads.common.resolvers import ROOT
from heads.common.typed import typed
from heads.formats import lora, store
from heads.formats.checkpoint import read_module
from heads.formats.mtp_layouts import layout_of, prefixes
from heads.formats.published import KINDS, format_of, is_published, load_published
from heads.formats.published.files import SAFE, further_files
from heads.formats.weights import shards

log = logging.getLogger(__name__)

REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def resolve_head(run_or_repo: str) -> Path:
    """Return the folder of a head: a run's, a published one's, or a download's; refuse a name without a head."""
    path = Path(run_or_repo).expanduser()
    if last_good(path).is_dir():
        for folder in (path / "head", path):
            if (last_good(folder) / store.CONFIG).is_file():
                return folder
        raise ValueError(
            f"{path}: no head in it, neither head/{store.CONFIG} nor {store.CONFIG}; let its training save one"
        )
    if path.parent.is_dir() or not REPO.fullmatch(run_or_repo):
        raise ValueError(f"{path}: no such folder; give a run's or published folder, or a Hub id OWNER/NAME")
    return _downloaded_head(run_or_repo)


def _downloaded_head(repo: str) -> Path:
    """Return the folder of a downloaded head or adapter; refuse any other model before the download."""
    folder = downloaded(repo, [store.CONFIG, *SAFE, store.INDEX, *lora.FILES, "config.yaml"])
    if not (folder / lora.CONFIG).is_file() and (further := further_files(folder)):
        if (folder / store.INDEX).is_file():
            format_of(folder)
        downloaded(repo, further)
    return folder


def downloaded(repo: str, patterns: Sequence[str]) -> Path:
    """Download the repository's files that match the patterns, or use the cached ones; refuse if both fail."""
    try:
        check_reachable(repo)
    except ValueError as error:
        raise ValueError(f"{repo}: {error}") from None
    with hub_errors(repo, "downloading"):
        return Path(HfApi().snapshot_download(repo, allow_patterns=[*patterns]))


def load_found(folder: Path, embeddings: Embeddings, spec: store.TargetSpec) -> nn.Module:
    """Load a head on the CPU in its saved dtype, ours or another project's; merge an adapter into its base in fp32."""
    if not (folder / lora.CONFIG).is_file():
        return load_published(folder, embeddings) if is_published(folder) else store.load_head(folder, embeddings, spec)
    content = store.read_config(folder)
    store.assert_same_target(folder, typed(store.TargetSpec, content["target"]), spec)
    adapter = lora.read_adapter(folder)
    return lora.merge(base_head(adapter.base, store.head_config(folder, content), embeddings, spec), adapter, folder)


def base_head(name: str, config: HeadConfig, embeddings: Embeddings, spec: store.TargetSpec) -> nn.Module:
    """Return the base head of an adapter in fp32, always from the Hub: a head, or the MTP module of a model there.

    Refuse what is no Hub id, an adapter, and a head of another configuration.
    """
    if not REPO.fullmatch(name):
        raise ValueError(f"base={name[:80]}: no name of the Hub, OWNER/NAME, where the base of an adapter is")
    kind = HEADS[config.name]
    head: nn.Module = kind(config, embeddings)
    index, layers = downloaded(name, [store.INDEX]) / store.INDEX, embeddings.num_layers
    named = shards(index).items() if index.is_file() else ()
    files = {tensor: index.parent / file for tensor, file in named if tensor.startswith(prefixes(layers))}
    if layout_of(files, layers) is not None:  # a model with a module, whose files alone are downloaded
        downloaded(name, sorted({file.name for file in files.values()}))
        _, tensors = read_module(files, layers) or (None, {})
        if tensors.keys() == head.state_dict().keys():
            head.load_state_dict(tensors)
            return head
    folder = _downloaded_head(name)
    if (folder / lora.CONFIG).is_file():
        raise ValueError(f"base={name}: an adapter itself; publish the whole head, without base")
    loaded: Any = load_found(folder, embeddings, sibling_spec(folder, spec, "is adapted for"))
    if type(loaded.config) is not type(config) or replace(loaded.config, name=config.name) != config:
        raise ValueError(f"base={name}: its configuration is not the adapted head's; give the head training began from")
    head.load_state_dict(loaded.state_dict())
    return head


def made_for(folder: Path) -> store.TargetSpec | None:
    """Return the target that a head was trained for; None for another project's head, which records none."""
    return None if is_published(folder) else typed(store.TargetSpec, store.read_config(folder)["target"])


def sibling_spec(folder: Path, spec: store.TargetSpec, use: str) -> store.TargetSpec:
    """Return the target's spec with the fingerprint of the head's own target, which may differ.

    A head can so draft for, or initialise a head of, the target after fine-tuning, quantisation or an adapter. The
    shapes must agree. `use` names the head's use in the warning.
    """
    saved = made_for(folder)
    if saved is None or saved.fingerprint == spec.fingerprint:
        return spec
    log.warning("%s: made for the weights of %s; it %s those of %s", folder, saved, use, spec)
    return replace(spec, fingerprint=saved.fingerprint)


def kind_of(folder: Path) -> str:
    """Return the kind of head in a folder; refuse a folder without a head."""
    if not is_published(folder):
        return str(store.read_config(folder)["head"]["name"])
    name = format_of(folder)
    return KINDS.get(name, name)


def on_hub(name: str) -> bool:
    """Return whether a model's name is a Hub id rather than a local path."""
    return REPO.fullmatch(name) is not None and not Path(target_path(name)).exists()


def target_path(name: str) -> str:
    """Return the path or Hub id of a head's target; published paths are relative to the checkout or the home folder."""
    if name.startswith("~/"):
        return str(Path(name).expanduser())
    inside = ROOT / name
    return str(inside) if inside.is_dir() and not Path(name).exists() else name


@contextmanager
def hub_errors(repo: str, doing: str) -> Iterator[None]:
    """Turn errors of the Hub or the connection into a ValueError of one line with the remedy."""
    try:
        yield
    except (TRANSPORT, OSError, RuntimeError) as error:
        answered = error if isinstance(error, HfHubHTTPError) else error.__cause__  # an upload's error wraps the Hub's
        if not isinstance(answered, HfHubHTTPError):
            cause = error.__cause__ or error
            why = f"{type(cause).__name__}: {one_line(cause)}"
            raise ValueError(f"{repo}: {doing} broke off ({why}); check the connection and try again") from error
        status = answered.response.status_code
        if status in (401, 403, 404):
            raise ValueError(
                f"{repo}: the Hub refused {doing} ({status}): no such repository, or the token lacks the right to it; "
                "log in with `hf auth login` or set HF_TOKEN"
            ) from error
        detail = one_line(ValueError(answered.server_message)) if answered.server_message else one_line(answered)
        raise ValueError(f"{repo}: the Hub answered {status} while {doing} ({detail}); try again later") from error
