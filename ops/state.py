"""The state of a head's maintenance: one file, written whole with each decision."""

from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from heads.common.files import read_checked, write_checked
from heads.common.typed import typed
from heads.common.untrusted import visible

FILE = "state.json"
WATCH, ADAPT, PROVE, SWAP = "watch", "adapt", "prove", "swap"


@dataclass
class State:
    """Where a maintenance is: its round, the stage to run next, the lines of the log, every decision so far.

    Attributes:
        serve: the head in service, as it was named.
        round: counted from 1; each ends with a swap, or with the decision that there is none.
        begin: the line of the log, from 0, with which this round's watch began.
        since: the line from which on the log is new; None before an alarm.
        tried: the lines that the log had when a round swapped nothing; 0 where the last round swapped a head.
    """

    serve: str
    round: int = 1
    stage: str = WATCH
    begin: int = 0
    since: int | None = None
    tried: int = 0
    decisions: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, serve: str) -> "State":
        """Return the state in a folder, a new one where there is none; refuse that of another head."""
        file = folder / FILE
        if not file.is_file():
            return cls(serve)
        content = read_checked(file)
        state = typed(cls, {key: content.get(key) for key in (one.name for one in fields(cls))})
        if state.serve != serve:
            raise ValueError(f"{folder} maintains {state.serve}, not serve={serve}: give that, or another out")
        return state

    def folder(self, out: Path) -> Path:
        """Return the folder of this round."""
        return out / f"round-{self.round}"

    def drop_quiet(self) -> None:
        """Drop the last decision where it is that nothing happened: a new one, as of each cron's call, replaces it."""
        if self.decisions and self.decisions[-1]["stage"] == WATCH and not self.decisions[-1]["evidence"]:
            self.decisions.pop()

    def decide(self, out: Path, decision: str, evidence: dict[str, Any], stage: str, **changes: Any) -> None:
        """Record a decision of this stage, go on to another one, and say so."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        record = {"at": now, "round": self.round, "stage": self.stage, "decision": decision, "evidence": evidence}
        self.decisions.append(record)
        Console().print(visible(f"{self.stage}: {decision}"), highlight=False, soft_wrap=True, markup=False)
        self.stage = stage
        for key, value in changes.items():
            setattr(self, key, value)
        write_checked(out / FILE, asdict(self))
