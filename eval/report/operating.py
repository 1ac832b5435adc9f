"""What operators read: the tokens a second of all users against those of one, by draft setting, and where drafts lose.

Each curve is a sweep: over batch sizes, as many requests being answered all the time, or over rates of requests.
"""

import math
from typing import NamedTuple

from eval.measures.cost_model import stops_paying
from eval.measures.results import ENDPOINT
from eval.report.breakdown import PLAIN, SESSION
from eval.report.columns import Table, plain_table
from eval.report.plots import LINE, Plot, axis, by_name, clocked, curve, layer, lines, plot
from eval.report.view import Record, origin, shown_interval

USER = "user_tokens_per_second"  # of by_request
FILLED = 4  # requests for each that is answered at a time: else beginning and end of a session weigh too much
LOADS = {"batch_size": "batch size {:g}", "request_rate": "{:g} requests a second"}


class Point(NamedTuple):
    """A draft setting at a load; `user` and `whole` are tokens a second of one user, the median, and of all."""

    curve: str
    key: str  # of the row, for its load
    load: float
    user: float
    whole: float
    row: Record

    @property
    def at(self) -> str:
        """The load in words."""
        return LOADS[self.key].format(self.load)


def points(report: Record) -> list[Point]:
    """Return the points of every sweep that a report holds, in its order; nothing for a single load."""
    whole = [row for row in clocked(report)["rows"] if not row.get("category")]
    swept = []
    for key in LOADS:
        rows = [row for row in whole if (row.get("request_rate") is None) == (key == "batch_size")]
        of_key = [point for name, row in lines({**report, "rows": rows}, key) if (point := _point(name, key, row))]
        order = list(dict.fromkeys(point.curve for point in of_key))
        of_key.sort(key=lambda point: (order.index(point.curve), point.load))
        swept += of_key if len({point.load for point in of_key}) > 1 else []
    return swept


def _point(name: str, key: str, row: Record) -> Point | None:
    user = row["by_request"].get(USER, {}).get("p50")
    whole = row.get("whole_tokens_per_second") or row["tokens_per_second"]  # at a rate the prefills are in the second
    if user is None or whole is None:
        return None
    tree = "" if row["drafter"] == PLAIN else f", {row['tree']}"
    return Point(f"{name}{tree}" + ", at a rate" * (key == "request_rate"), key, float(row[key]), user, whole, row)


def _by_device(report: Record, swept: list[Point]) -> tuple[list[float], str]:
    """Return the tokens a second of all users at every point over the number of its devices, and what they are of."""
    devices = [origin(report, one.row)["device"] for one in swept]
    whose = dict.fromkeys("of the server" if device.get("type") == ENDPOINT else "of a device" for device in devices)
    return [one.whole / device.get("count", 1) for one, device in zip(swept, devices, strict=True)], " or ".join(whose)


def plots(report: Record) -> list[Plot]:
    """Return the tokens a second of all users, per device, against those of one."""
    swept = points(report)
    by_device, whose = _by_device(report, swept)
    data = [
        {"name": one.curve, "load": one.load, "at": one.at, "user": one.user, "all": tokens}
        for one, tokens in zip(swept, by_device, strict=True)
    ]
    x = axis("user", "tokens a second of one user, median")
    y = axis("all", f"tokens a second {whose}, all users")
    along = {"order": {"field": "load", "type": "quantitative"}}
    text = {"field": "load", "type": "quantitative", "format": "~g"}
    numbers = layer({"type": "text", "dx": 9, "dy": -7}, x=x, y=y, text=text, color=by_name())
    sweeps = curve(x, y, "at:N", "user:Q .1f", "all:Q .1f", mark=LINE, **along)
    caption = (
        f"Tokens a second {whose}, all users, against those of one user: a curve for each draft setting, its numbers "
        "batch sizes or requests a second. Further up and to the right is better"
    )
    return plot(caption, data, [sweeps, numbers], 340)


def table(report: Record) -> Table:
    """Return the numbers of the plot."""
    swept = points(report)
    by_device, whose = _by_device(report, swept)
    body = [
        [
            *(one.curve, one.at, one.user, tokens, one.row["prompts"]),
            shown_interval(one.row["speedup"], one.row["speedup_ci"]),
        ]
        for one, tokens in zip(swept, by_device, strict=True)
    ]
    titles = ("draft setting", "load", "tok/s of one user", f"tok/s {whose}", "requests", "speedup")
    return plain_table("operating", titles, body, 1)


def crossings(report: Record) -> list[str]:
    """Return for each draft setting from which load on, and below which speed of a user, the baseline is better."""
    curves: dict[str, list[Point]] = {}
    for one in points(report):
        curves.setdefault(one.curve, []).append(one)
    plain = {_session(sweep[0]): sweep for sweep in curves.values() if sweep[0].row["drafter"] == PLAIN}
    lines = []
    for name, sweep in curves.items():
        timed = {one.load: one for one in sweep if one.row["speedup"] is not None}
        if sweep[0].row["drafter"] != PLAIN and timed:
            lines.append(f"{name}: {_crossing(timed)}; {_speeds(sweep, plain.get(_session(sweep[0]), []))}")
    return lines


def _session(one: Point) -> tuple[object, ...]:
    return one.key, *(one.row.get(key) for key in SESSION if key != one.key)


def _crossing(by_load: dict[float, Point]) -> str:
    """Return from which load on a draft setting loses, in words."""
    first = stops_paying({load: one.row["speedup"] for load, one in by_load.items()})
    below = [one for load, one in by_load.items() if first is None or load < first]
    losing = [one.at for one in below if one.row["speedup"] <= 1]
    if first is None:
        verdict = f"still pays at {below[-1].at}, the greatest load measured ({_speedup(below[-1])})"
    elif not below:
        return f"loses at every load measured, from {by_load[first].at} on ({_speedup(by_load[first])})"
    else:
        verdict = f"pays up to {below[-1].at}, loses from {by_load[first].at} on ({_speedup(by_load[first])})"
    return verdict + (f", but loses at {', '.join(losing)}" if losing else "")


def _speeds(sweep: list[Point], plain: list[Point]) -> str:
    """Return at which speeds of a user a sweep gives all users more than the baseline's, in words."""
    speeds = sorted({one.user for one in (*sweep, *plain)})
    worse = [speed for speed in speeds if _whole(sweep, speed) <= _whole(plain, speed)]
    if not worse:
        return "it serves more users than plain at every speed"
    if worse[-1] == speeds[-1]:
        return "plain serves more users at every speed" if worse == speeds else "plain serves more users at high speeds"
    return f"it serves more users than plain where one is to see more than {worse[-1]:.1f} tokens a second"


def _whole(sweep: list[Point], speed: float) -> float:
    """Return the most tokens a second of all users with which one sees so many at least; 0 where none does."""
    return max((one.whole for one in sweep if one.user >= speed), default=0.0)


def _speedup(one: Point) -> str:
    kind = "speedup" if one.key == "batch_size" else "latency ratio"
    low, high = one.row["speedup_ci"] or (None, None)
    unsure = low is not None and high is not None and low < 1 < high
    return f"{kind} {shown_interval(one.row['speedup'], one.row['speedup_ci'])}" + ", not clear of 1" * unsure


def checks(report: Record) -> list[str]:
    """Return what can be wrong with the points, or that nothing is: warm-up, steady state, requests."""
    swept = points(report)
    if not swept:
        return []
    warmup = report["settings"].get("warmup")
    by_doubt: dict[str, list[str]] = {}
    for one in swept:
        if doubt := _doubt(one):
            by_doubt.setdefault(doubt, []).append(f"{one.curve} at {one.at}")
    doubts = [f"{doubt}: {'; '.join(where)}" for doubt, where in by_doubt.items()]
    return [
        f"warm-up before each session: warmup={warmup}" if warmup else "no warm-up: give warmup=1 or more",
        *(doubts or ["steady state, and enough requests, at every point"]),
    ]


def _doubt(one: Point) -> str:
    """Return why a point may not be what its load gives in the long run; nothing where it is."""
    slots, rate, by_request = one.row["batch_size"], one.row["request_rate"], one.row["by_request"]
    answering = by_request["latency_s"]["p50"] - by_request.get("queue_s", {}).get("p50", 0.0)
    running = slots if rate is None else math.ceil(rate * answering)
    if running > slots:
        return "no steady state, requests come faster than they are answered and the queue grows while they come"
    few = one.row["prompts"] < FILLED * running
    return f"few requests, give prompts={FILLED * running} or more" if few else ""
