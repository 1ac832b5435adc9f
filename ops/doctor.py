"""Examine a published head: does it load and draft for its target as its card says, and what does each engine read.

    python ops/doctor.py run=outputs/NAME target=/my/model

The head is a folder or a repository of the Hub, in our own form or in any foreign one that is read here. Nothing is
written. The exit status is 1 where something is wrong.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root instead of ops/, so that its files shadow no module
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omegaconf import DictConfig

from heads.common.command import command
from heads.common.errors import one_line
from heads.common.typed import typed
from heads.common.untrusted import visible
from heads.formats.hub import load_found, sibling_spec
from heads.formats.store import CONFIG
from inference.target.target import Target
from ops.examine.acceptance import acceptance
from ops.examine.config import DoctorConfig
from ops.examine.files import OWN, load_target, read
from ops.examine.finding import WRONG, Finding, meant_for, ok, unknown, written, wrong
from ops.examine.keys import readings, records


def examine(config: DoctorConfig) -> list[Finding]:
    """Return the findings on a head, in order; a head that does not load has that one finding.

    Raises:
        ValueError: there is no such head, target or workload.
    """
    head = read(config.run)
    target, why = load_target(config.target, head, config.dtype, config.measure)
    try:
        sibling = head.form == OWN and config.sibling
        spec = sibling_spec(head.folder, target.spec, "is examined for") if sibling else target.spec
        loaded = load_found(head.folder, target.embeddings, spec)
    except (ValueError, OSError) as error:
        trouble, _, remedy = one_line(error).rpartition("; ")
        costs = "headstart refuses it, so that nothing can be measured"
        return [wrong("loads", trouble or remedy, costs, remedy if trouble else "export or download it again")]
    findings = [ok(f"headstart loads it for {target.spec.name}", "loads"), *records(head, target, config.sibling)]
    try:
        findings += readings(head, loaded, target)
    except (TypeError, AttributeError, KeyError, ValueError) as error:  # a value that its format does not have there
        findings.append(wrong(CONFIG, one_line(error), "engines stop at it", "export or download the head again"))
    if isinstance(target, Target) and config.measure:
        findings.append(acceptance(head, target, loaded, config))
    else:
        findings.append(unknown(why or "measure is false", "acceptance"))
    return [meant_for(finding, config.format) for finding in findings]


@command("ops/doctor")
def main(cfg: DictConfig) -> None:
    """Print the findings, and exit with 1 where something is wrong."""
    findings = examine(typed(DoctorConfig, cfg))
    print(visible(written(findings)))
    raise SystemExit(int(any(finding.verdict == WRONG for finding in findings)))


if __name__ == "__main__":
    main()
