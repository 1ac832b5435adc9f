"""The audit against servers with planted faults, and clean ones: what it names, and how often it is wrong.

python benchmarks/audit.py [clean=200] [first=0] [noise=0.03] [faults=true]
Servers are those of tests/ops/audit_server.py: a toy model with real speculative decoding, over HTTP. Noise is added
to every logit of every pass, of the baseline too; `first` is the seed of the first clean run. A line a run; at the end
the false alarms and the faults not named.
"""

import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from heads.common.typed import from_yaml
from ops.audit import JSON, Verdict, audited
from ops.audits.compare import AuditConfig
from tests.ops.audit_decoding import ALTERNATIVES, FAULTS
from tests.ops.audit_server import AuditServer

NAMED = {
    "temperature": "distribution",
    "rejected_draft": "wrong_token",
    "draft_bonus": "wrong_token",
    **dict.fromkeys(ALTERNATIVES, "logprobs"),
}  # by the audit, where the name there is another
PASS_S = 0.01  # seconds a pass, for the fault that is one of speed: more than the server itself takes on a busy machine


def run(fault: str, noise: float, seed: int) -> tuple[Verdict, dict[str, object]]:
    """Audit a server with a fault, empty for none, and return verdict and speed."""
    pass_s = PASS_S if fault == "slow_concurrency" else 0.0
    with (
        AuditServer(speculates=True, fault=fault, noise=noise, seed=seed, pass_s=pass_s) as server,
        AuditServer(speculates=False, noise=noise, seed=seed + 1, pass_s=pass_s) as baseline,
        tempfile.TemporaryDirectory() as out,
    ):
        asked = {"url": server.url, "baseline": baseline.url, "prompts": 12, "max_new_tokens": 48, "seed": seed}
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            verdict = audited(from_yaml(AuditConfig, "ops/audit", **asked, out=out))
        record = json.loads((Path(out) / JSON).read_text(encoding="utf-8"))
    return verdict, record["findings"][-1]["figures"]


def main() -> None:
    """Run and print."""
    words = dict(word.split("=") for word in sys.argv[1:])
    noise = float(words.get("noise", "0.03"))
    clean, first = (int(words.get(key, value)) for key, value in (("clean", "200"), ("first", "0")))
    wrong = []
    for fault in FAULTS if words.get("faults", "true") == "true" else ():
        begin = time.perf_counter()
        verdict, speed = run(fault, noise, 0)
        right = speed["loses_from"] is not None if fault == "slow_concurrency" else (
            verdict.fault == NAMED.get(fault, fault)
        )  # fmt: skip
        wrong += [] if right else [fault]
        print(f"{fault:17} {verdict.status:9} {verdict.fault:15} {time.perf_counter() - begin:5.1f} s", flush=True)
    alarms = 0
    for seed in range(first, first + clean):
        verdict, _ = run("", noise, 1000 * seed)
        alarms += verdict.status != "passed"
        if verdict.status != "passed" or seed % 20 == 19:
            print(f"clean {seed + 1}: {verdict.status} {verdict.sentence}; {alarms} false alarms", flush=True)
    print(f"{alarms} false alarms in {clean} clean runs; not named: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
