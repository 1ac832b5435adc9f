"""The runs of a Hydra multirun: one table of costs and results, and the τ to optimise."""

import json
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.table import Table

from eval.report import sections
from eval.report.render import rich_table
from eval.report.view import results_of
from eval.report.write import read_report
from heads.common.command import sweeping
from heads.common.files import write_json
from heads.common.typed import Json

TABLE, WIDTH = "table.json", 140
COST = ("head", "parameters", "tokens", "GFLOP", "seconds")


def check(prompts: int, *, waits: bool) -> None:
    """Refuse to optimise τ if no run measures it, or if this command does not wait for its runs."""
    if not sweeping() or "direction" not in HydraConfig.get().sweeper:
        return
    if prompts == 0:
        raise ValueError(
            "trainer.eval_prompts is 0, and sweep=optuna is after the τ that a run measures: give 1 or more"
        )
    if not waits:
        raise ValueError(
            "launcher=slurm puts a run into the queue and does not wait for the τ that sweep=optuna is after: search "
            "inside one job with another launcher, or sweep without sweep=optuna"
        )


def best_tau(out: Path) -> float | None:
    """Return the best τ that a finished run measured during training; None if it measured none."""
    return float(json.loads((out / "training.json").read_text())["best_tau"]) or None


def note(name: str, drafter: str, out: Path) -> None:
    """Add a finished run to its multirun's table, if any, and print it; `drafter` is the head's name in the report."""
    if not sweeping():
        return
    path = Path(HydraConfig.get().sweep.dir, TABLE)
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [row for row in rows if row["out"] != str(out)] + rows_of(name, drafter, out)
    write_json(path, rows)
    Console(width=max(WIDTH, Console().width)).print(table(rows))


def rows_of(name: str, drafter: str, out: Path) -> list[Json]:
    """Return the timed rows of a finished run's report, with the run's cost."""
    cost = json.loads((out / "training.json").read_text())
    return [
        {"name": name, "out": str(out), "cost": cost, "failed": result.failed, **result.row}
        for result in results_of(read_report(out / "report.json"))
        if result.overall and result.row["drafter"] == drafter
    ]


def table(rows: list[Json]) -> Table:
    """Return the table for the terminal."""
    results = [replace(result, failed=result.row["failed"]) for result in results_of({"rows": rows})]
    measured = sections.table(sections.SWEEP, results)
    body = []
    for row, cells in zip(rows, measured.lines, strict=True):
        cost = row["cost"]
        flops = "-" if cost["flops"] is None else f"{cost['flops'] / 1e9:,.0f}"
        spent = [f"{cost['parameters']:,}", f"{cost['tokens']:,}", flops, f"{cost['seconds']:,.0f}"]
        body.append([row["name"], *spent, *cells])
    return rich_table("the runs of this multirun", [*COST, *measured.titles], body)
