"""The connection to the Hub: offline, only the local cache is read, and anything missing is refused at once."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name

from heads.common.errors import one_line

log = logging.getLogger(__name__)

NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # a repository's name; some old ones have no owner
# Base class of the transport's errors, which is the same whichever HTTP library huggingface_hub uses.
TRANSPORT: Any = HfHubHTTPError.__bases__[0]
PATIENCE = 2.5  # seconds that the Hub has to answer


def check_reachable(repo: str, kind: str = "model") -> None:
    """Make the libraries read only the local cache, as HF_HUB_OFFLINE=1 does, if the Hub cannot be reached.

    Otherwise they try each file again and again, for a minute. Refuse what is no repository's name and, without the
    Hub, a "model" or "dataset" that the cache does not hold; in one line, without the name.
    """
    if kind == "model" and Path(repo).is_file():
        raise ValueError("is a file; give its folder")
    if not NAME.fullmatch(repo):
        raise ValueError("no such folder, nor a Hub id OWNER/NAME")
    before = constants.is_offline_mode()
    if not (why := unreachable()):
        return
    if not Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type=kind)).is_dir():
        raise ValueError(f"neither here nor downloaded before, and {why}, or give a path of this machine")
    if not before:
        log.warning("%s is taken as it was downloaded before: %s", repo, why)


def unreachable() -> str | None:
    """Return why the Hub is not asked, with the remedy; None if it answers."""
    if constants.is_offline_mode():
        chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
        return "HF_HUB_OFFLINE is set: unset it" if chosen else f"{constants.ENDPOINT} cannot be reached: connect"
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except (TRANSPORT, OSError, ValueError) as error:
        constants.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT} cannot be reached ({one_line(error)}): connect"
    return None
