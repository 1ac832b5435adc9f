"""What a trace of torch's profiler says of a step: what took longest, launches, waits, idling. Pure functions of it.

A trace is in Chrome's format, times in microseconds. The steps are the spans named `STEP`; whatever begins within one
belongs to it, calls within a span named `OWN` left out: they are the measurement's. On a device the work is that of
kernels, copies and fills, on a CPU that of operations.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
Numbers = dict[str, Any]
Interval = tuple[float, float]

STEP, OWN = "step", "the measurement's own"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = "cpu_op"
RUNTIME = ("cuda_runtime", "cuda_driver")
READ = "aten::_local_scalar_dense"  # what item() is, and tolist() of one number
GRAPH = "cudaGraphLaunch"
LAUNCHES = ("LaunchKernel", GRAPH)  # parts of names: the driver has several
COPY = "Memcpy DtoH"
LARGEST = 20


def digest(events: Iterable[Event]) -> Numbers:
    """Return what the steps of a trace cost, each figure of one step, in milliseconds where it is a time.

    Returns:
        steps: how many there were.
        wall, busy: of a step, and of it the time in which the device (on a CPU any thread) had work.
        idle: the share of the step in which it had none.
        kernels: that ran on the device; operations called on a CPU.
        launches, graph_launches: calls by which the host started kernels one by one, and whole graphs.
        syncs: calls in which the host waited for the device, by name; reads: numbers that it read, one by one (item()).
        copies: from the device's memory to the host's.
        largest: [name, milliseconds, calls] of what took longest by itself, on the device if there is one.
        largest_host: the same of operations on the host.

    Raises:
        ValueError: the trace has no step.
    """
    timed = [each for each in events if each.get("ph") == "X"]
    spans, ours = _spans(timed, STEP), _spans(timed, OWN)
    if not spans:
        raise ValueError(f"the trace has no span named {STEP!r}: mark the steps with torch.profiler.record_function")
    inside = [each for each in timed if _within(each, spans)]
    device = [each for each in inside if each.get("cat") in DEVICE]
    host = [each for each in inside if each.get("cat") == HOST]
    runtime = Counter(each["name"] for each in inside if each.get("cat") in RUNTIME and not _within(each, ours))
    work, count = device or host, len(spans)
    own = list(own_times(host))
    wall = sum(end - start for start, end in spans)
    busy = sum(_length(_cut(work, span)) for span in spans)
    launched = {name: calls for name, calls in runtime.items() if any(part in name for part in LAUNCHES)}
    graphs = sum(calls for name, calls in launched.items() if GRAPH in name)
    return {
        "steps": count,
        "device": bool(device),
        "wall": wall / count / 1e3,
        "busy": busy / count / 1e3,
        "idle": 1 - busy / wall,
        "kernels": len(work) / count,
        "launches": (sum(launched.values()) - graphs) / count,
        "graph_launches": graphs / count,
        "syncs": {name: calls / count for name, calls in sorted(runtime.items()) if "Synchronize" in name},
        "reads": sum(each["name"] == READ for each in host) / count,
        "copies": sum(COPY in each["name"] for each in device) / count,
        "largest": _largest([(each["name"], each["dur"]) for each in device] or own, count),
        "largest_host": _largest(own, count),
    }


def _spans(events: Iterable[Event], name: str) -> list[Interval]:
    marks = [each for each in events if each["name"] == name and each.get("cat") == "user_annotation"]
    return [(each["ts"], each["ts"] + each["dur"]) for each in marks]


def _within(event: Event, spans: Iterable[Interval]) -> bool:
    return any(start <= event["ts"] < end for start, end in spans)


def own_times(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Yield the name of each operation and its time without that of operations within it, on the same thread."""
    threads: dict[Any, list[Event]] = {}
    for each in events:
        threads.setdefault((each["pid"], each["tid"]), []).append(each)
    for thread in threads.values():
        open_: list[tuple[Event, list[float]]] = []
        # What begins at the same time holds the shorter one.
        for each in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while open_ and each["ts"] >= open_[-1][0]["ts"] + open_[-1][0]["dur"]:
                yield _closed(open_.pop())
            if open_:
                open_[-1][1].append(each["dur"])
            open_.append((each, []))
        while open_:
            yield _closed(open_.pop())


def _closed(one: tuple[Event, list[float]]) -> tuple[str, float]:
    event, within = one
    return event["name"], max(event["dur"] - sum(within), 0.0)


def _cut(events: Iterable[Event], span: Interval) -> list[Interval]:
    """Return the events' intervals as far as they lie within a span."""
    cut = [(max(each["ts"], span[0]), min(each["ts"] + each["dur"], span[1])) for each in events]
    return [(start, end) for start, end in cut if end > start]


def _length(intervals: Iterable[Interval]) -> float:
    """Return the length of what is covered, once wherever intervals overlap."""
    covered, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(end - max(start, reach), 0.0)
        reach = max(reach, end)
    return covered


def _largest(own: Sequence[tuple[str, float]], steps: int) -> list[list[Any]]:
    total: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for name, spent in own:
        total[name] += spent
        calls[name] += 1
    first = sorted(total, key=lambda name: (-total[name], name))[:LARGEST]
    return [[name, total[name] / steps / 1e3, calls[name] / steps] for name in first]
