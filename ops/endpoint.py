"""python ops/endpoint.py url=URL: acceptance and speed of a served model, with baseline=URL its speedup."""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout's root in place of this folder, or `import heads` would fail
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omegaconf import DictConfig

from eval.run import publish
from heads.common.command import command, ending_alone
from heads.common.errors import keeping, user_errors
from heads.common.files import check_writable
from heads.common.typed import typed
from ops.served.measurement import ServedConfig, measure


@command("ops/endpoint")
def main(cfg: DictConfig) -> None:
    """Measure, and write the report; exit with 1 if texts differ from the baseline's, 2 for a mistake."""
    with ending_alone(), user_errors():
        config = typed(ServedConfig, cfg)
        out = Path(config.out).expanduser()
        check_writable(out, "out")
        with keeping(lambda: "nothing was written; the same command measures again"):
            report = measure(config)
            publish(report, out)
        if not report.passed:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
