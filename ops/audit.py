"""python ops/audit.py url=URL baseline=URL: is a served model lossless, and how much faster, asked over HTTP alone."""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout's root in place of this folder, or `import heads` would fail
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omegaconf import DictConfig

from heads.common.command import command, ending_alone
from heads.common.errors import user_errors
from heads.common.typed import typed
from ops.audits.ask import AuditConfig
from ops.audits.compare import FAILED, PASSED
from ops.audits.run import audited


@command("ops/audit")
def main(cfg: DictConfig) -> None:
    """Audit; exit with 0 if the server passed, 1 if it failed, 2 for a mistake, 3 if undecided."""
    with ending_alone(), user_errors():
        verdict = audited(typed(AuditConfig, cfg))
        raise SystemExit({PASSED: 0, FAILED: 1}.get(verdict.status, 3))


if __name__ == "__main__":
    main()
