"""What heads.py tells: a training's figures from its folder, rows from reports, the goals judged, tables, a figure."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import Figure, Table
from eval.report.view import shown_interval

TAU_GOAL, SPEEDUP_GOAL = 3.5, 2.5  # on code at temperature 0, of one head
SETTLED = 3  # steps before which nothing of training's speed counts
AT_THE_END = 20  # steps whose loss is averaged
PLAIN = "plain"
Row = Mapping[str, Any]


def training_facts(folder: Path, rate: float) -> dict[str, Any]:
    """Return what a head's training cost.

    Args:
        folder: the run's.
        rate: operations a second of a large matrix product on this device, which MFU is told against.
    """
    cost = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "tokens_per_second" in record]
    counted = steps[SETTLED:] or steps[-1:]
    flops = [each["flops_per_second"] for each in counted if "flops_per_second" in each]
    sheet = [each["mfu"] for each in counted if "mfu" in each]
    return {
        "parameters": cost["parameters"],
        "tokens": cost["tokens"],
        "tokens_per_second": statistics.median(each["tokens_per_second"] for each in counted),
        "flops_per_second": statistics.median(flops) if flops else None,
        "mfu": statistics.median(flops) / rate if flops else None,
        "mfu_of_data_sheet": statistics.median(sheet) if sheet else None,
        "seconds": cost["seconds"],
        "stall_share": cost["stall_seconds"] / max(cost["seconds"], 1e-9),
        "peak_memory_bytes": max(each["memory_bytes"] for each in steps),
        "loss": statistics.mean(each["loss"] for each in steps[-AT_THE_END:]),
    }


def measured(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the live rows of a report of eval/run.py, with the gates' verdict on each."""
    gates, drawn = report["settings"]["gate"], report["settings"].get("sampled_gate", [])
    found = []
    for row in report["rows"]:
        if row["tier"] != "live" or row["category"]:
            continue
        sampled = [
            each for each in drawn if (each["drafter"], each["temperature"]) == (row["drafter"], row["temperature"])
        ]
        passed = gates.get(row["drafter"], {"passed": True})["passed"] and all(each["passed"] for each in sampled)
        kept = (
            "drafter", "tree", "rule", "temperature", "prompts", "steps", "tau", "tau_ci", "accepted_by_depth",
            "tokens_per_second", "speedup", "speedup_ci", "lossless", "agreement", "seconds", "memory_bytes",
        )  # fmt: skip
        found.append(
            {"workload": Path(row["workload"]).stem, **{key: row[key] for key in kept}, "passed": passed}
            | {"engine": report["settings"]["engine"], "dtype": report["device"]["dtype"]}
        )
    return found


def best(rows: Sequence[Row]) -> Row | None:
    """Return the row of the head that comes nearest to both goals on code at temperature 0; None without one."""
    some = [row for row in rows if (row["workload"], row["temperature"]) == ("code", 0.0) and row["drafter"] != PLAIN]
    return max(some, key=lambda row: min(row["tau"] / TAU_GOAL, (row["speedup"] or 0.0) / SPEEDUP_GOAL), default=None)


def goals(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the best head and whether it meets both goals; a speedup that its gate withholds meets none."""
    row = best(rows)
    if row is None:
        return {}
    return {
        "head": row["drafter"], "tau": row["tau"], "tau_met": row["tau"] >= TAU_GOAL, "speedup": row["speedup"],
        "speedup_met": bool(row["passed"]) and (row["speedup"] or 0.0) >= SPEEDUP_GOAL,
    }  # fmt: skip


def within(value: float | None, interval: Sequence[float] | None) -> str:
    """Return a figure with its interval."""
    return (
        "withheld" if value is None else shown_interval(value, None if interval is None else (interval[0], interval[1]))
    )


def goal_table(rows: Sequence[Row]) -> list[Table]:
    """Return the goals beside what was measured; nothing before code is measured."""
    judged, row = goals(rows), best(rows)
    if row is None:
        return []
    met = {True: "met", False: "not met"}
    engine = f"{row['engine']}, {row['dtype']}, batch 1"
    lines = [
        ("tau on code, T = 0", row["drafter"], within(row["tau"], row["tau_ci"]), f">= {TAU_GOAL}",
         met[judged["tau_met"]]),
        (f"speedup there, {engine}", row["drafter"], within(row["speedup"], row["speedup_ci"]), f">= {SPEEDUP_GOAL}",
         met[judged["speedup_met"]]),
    ]  # fmt: skip
    return [Table("The best head against the goals", ("what", "head", "measured", "goal", ""), lines)]


def verdict(rows: Sequence[Row]) -> str:
    """Return how many prompts of these rows are lossless, near ties told apart."""
    counts = {key: sum(row["lossless"].get(key, 0) for row in rows) for key in ("checked", "identical", "near_tie")}
    ties = f", {counts['near_tie']} near ties" if counts["near_tie"] else ""
    red = "" if all(row["passed"] for row in rows) else " RED"
    return f"{counts['identical']}/{counts['checked']}{ties}{red}"


def speed_table(rows: Sequence[Row], temperature: float) -> Table:
    """Return tau and speedup of every head on every workload at one temperature."""
    some = [row for row in rows if row["temperature"] == temperature]
    workloads = list(dict.fromkeys(row["workload"] for row in some))
    lines = []
    for head in dict.fromkeys(row["drafter"] for row in some):
        mine = {row["workload"]: row for row in some if row["drafter"] == head}
        cells = []
        for workload in workloads:
            row = mine.get(workload)
            if row is None:
                cells += ["", ""]
            elif head == PLAIN:
                cells += ["1.00", f"{row['tokens_per_second']:.0f} tokens/s"]
            else:
                cells += [within(row["tau"], row["tau_ci"]), within(row["speedup"], row["speedup_ci"])]
        lines.append([head, *cells, "" if head == PLAIN else verdict(list(mine.values()))])
    header = ["head", *(f"{workload}: {what}" for workload in workloads for what in ("tau", "speedup")), "lossless"]
    return Table(f"Every head at T = {temperature:g}, 95 % intervals over the prompts", header, lines)


def step_table(rows: Sequence[Row]) -> list[Table]:
    """Return where a step's time goes on code at temperature 0; nothing before it is measured."""
    some = [row for row in rows if (row["workload"], row["temperature"]) == ("code", 0.0)]
    lines = []
    for row in some:
        parts = [row["seconds"].get(part, 0.0) / max(row["steps"], 1) * 1e3 for part in ("draft", "verify", "other")]
        lines.append([row["drafter"], row["tree"], *(f"{part:.2f}" for part in parts), f"{sum(parts):.2f}"])
    header = ("head", "tree", "draft ms", "verify ms", "other ms", "step ms")
    return [Table("Where a step's time goes, code, T = 0", header, lines)] if lines else []


def training_table(trained: Mapping[str, Row], features: str) -> Table:
    """Return what every head's training cost."""
    lines = []
    for head, facts in trained.items():
        mfu = "" if facts["mfu"] is None else f"{facts['mfu']:.1%}"
        lines.append([
            head, f"{facts['parameters'] / 1e6:.2f} M", f"{facts['tokens'] / 1e6:.2f} M",
            f"{facts['tokens_per_second']:,.0f}", mfu, f"{facts['stall_share']:.0%}",
            f"{facts['peak_memory_bytes'] / 2**30:.2f}", f"{facts['seconds']:.0f}", f"{facts['loss']:.3f}",
        ])  # fmt: skip
    header = ("head", "parameters", "tokens", "tokens/s", "MFU", "waiting", "peak GiB", "seconds", "loss")
    return Table(f"Training on the same rows, features {features}", header, lines)


def tables_of(numbers: Mapping[str, Any]) -> list[Table]:
    """Return the tables of the record, and what is not there yet."""
    rows = numbers["measured"]
    found = goal_table(rows)
    found += [speed_table(rows, temperature) for temperature in sorted({row["temperature"] for row in rows})]
    found += step_table(rows)
    if numbers["trained"]:
        found.append(training_table(numbers["trained"], numbers["features"]))
    missing = [(piece, "not finished") for piece in numbers["left"]]
    missing += [(piece, f"failed with status {status}") for piece, status in numbers["failed"].items()]
    return [*found, *([Table("Missing", ("what", "why"), missing)] if missing else [])]


def figures_of(numbers: Mapping[str, Any]) -> list[Figure]:
    """Return the speedups as bars, a panel for each temperature; nothing before they are measured."""
    values = [
        {
            "head": row["drafter"], "workload": row["workload"], "T": f"T = {row['temperature']:g}",
            "speedup": row["speedup"],
        }
        for row in numbers["measured"]
        if row["drafter"] != PLAIN and row["speedup"] is not None
    ]  # fmt: skip
    if not values:
        return []
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "data": {"values": values},
        "mark": "bar",
        "encoding": {
            "column": {"field": "T", "title": None},
            "x": {"field": "head", "title": None},
            "xOffset": {"field": "workload"},
            "y": {"field": "speedup", "type": "quantitative", "title": "speedup over the baseline"},
            "color": {"field": "workload", "title": None},
        },
    }  # fmt: skip
    return [Figure("heads-speedup", "Speedup of every head over the baseline, by workload and temperature", spec)]
