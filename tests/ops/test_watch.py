"""The watch of a head in service: when it raises an alarm and when not, and how it reads logs and servers."""

import json
import os
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.inputs.drafters import load_drafters
from eval.measures.counters import Counters
from eval.measures.metrics import SpecDecodingStats, count_passes
from eval.setup import load_target
from eval.teacher_forced import recorded_texts, teacher_forced_rows
from heads.common.typed import from_yaml
from heads.formats.hub import resolve_head
from inference.drafters.head import load_drafter
from inference.target.config import model_config
from ops.served import ClientConfig, Metrics, Question, Server
from ops.watch import (
    ALARM,
    EARLY,
    QUIET,
    BettingTest,
    Log,
    WatchConfig,
    WatcherConfig,
    changed_at,
    counts_in,
    growing,
    main,
    replayed,
    watched,
    windows,
)
from tests.eval.small import run_command, small
from tests.ops.endpoint_server import Served

WATCHER: dict[str, Any] = {
    "alarm_rate": 0.05, "reference": 40, "tolerance": 0.0, "follow": False, "poll": 0.01,
}  # fmt: skip


def config(**values: Any) -> WatcherConfig:
    return from_yaml(WatchConfig, "ops/watch", log="log", **WATCHER | values)


def of_server(url: str, **values: Any) -> WatchConfig:
    given = WATCHER | {"follow": True, "url": url, "api_key_env": "NO_KEY"} | values
    return from_yaml(WatchConfig, "ops/watch", **given)


def stream(rng: np.random.Generator, count: int, accept: float) -> Iterator[SpecDecodingStats]:
    """Yield requests whose own acceptance varies around `accept`, in chains of 3."""
    for _ in range(count):
        p = float(np.clip(rng.normal(accept, 0.1), 0, 1))
        taken = [int((rng.random(3) < p).cumprod().sum()) for _ in range(rng.integers(5, 30))]
        yield count_passes(taken, 3 * len(taken), sum(taken) + len(taken))


def first_alarm(observations: Iterator[SpecDecodingStats], watcher: WatcherConfig) -> Any:
    return watched(observations, watcher).alarm


def test_quiet_streams_raise_fewer_alarms_than_the_rate_says() -> None:
    alarms = sum(first_alarm(stream(np.random.default_rng(i), 160, 0.6), config()) is not None for i in range(24))
    assert alarms <= 4  # of 1.2 expected at most: 5 or more have probability 0.6 %


def test_a_fall_raises_an_alarm_soon_which_says_since_when_and_how_far() -> None:
    rng = np.random.default_rng(0)
    outcome = watched([*stream(rng, 100, 0.7), *stream(rng, 200, 0.45)], config())
    assert 100 < outcome.alarm.at < 150
    assert abs(outcome.alarm.since - 100) <= 5
    assert outcome.alarm.before > 1.2 > outcome.alarm.after
    assert "\n" not in str(outcome.alarm)
    assert outcome.status == ALARM


def test_a_rise_or_a_loss_within_the_tolerance_is_no_alarm() -> None:
    rng = np.random.default_rng(0)
    assert first_alarm(iter([*stream(rng, 60, 0.5), *stream(rng, 200, 0.8)]), config()) is None
    falls = [*stream(rng, 60, 0.7), *stream(rng, 200, 0.45)]
    assert first_alarm(iter(falls), config()) is not None
    assert first_alarm(iter(falls), config(tolerance=0.6)) is None


def test_the_capital_is_fair_at_the_reference_mean() -> None:
    """Its average over many streams is 1 at most: a capital that is no supermartingale fails this."""
    rng = np.random.default_rng(4)
    evidence = []
    for _ in range(400):
        values = rng.beta(2, 2, 60)
        mean = BettingTest(values[:30], 0.0)
        evidence.append([mean.update(float(value)) for value in values[30:]][-1])
    assert np.mean(evidence) <= 1.0


def test_the_change_is_where_the_means_differ_most() -> None:
    assert changed_at(np.array([2.0] * 30 + [1.0] * 10)) == 30
    assert changed_at(np.array([1.0] * 30 + [2.0] * 10)) == 0
    assert changed_at(np.array([1.0])) == 0


def test_records_that_count_their_passes_are_read() -> None:
    own = counts_in({"accepted": [2, 0, 3]})
    assert (own.steps, own.accepted, list(own.by_depth)) == (3, 5, [2, 2, 1])
    vllm = {"num_spec_steps": 3, "num_accepted_draft_tokens": 5, "num_draft_tokens": 9,
            "acceptance_histogram": [1, 0, 1, 1]}  # fmt: skip
    for record in ({"metrics": {"speculative_decoding": vllm}, "usage": {"completion_tokens": 9}},
                   {"response": {"body": {"metrics": {"speculative_decoding": vllm}}}}):  # fmt: skip
        counts = counts_in(record)
        assert (counts.steps, list(counts.by_depth)) == (3, [2, 2, 1])
    assert counts_in({"prompt": "a", "answer": "b"}) is None
    assert counts_in({"accepted": [True, -1]}) is None


def write(path: Path, accept: list[list[int]], mode: str = "w") -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps({"accepted": one}) + "\n" for one in accept)


def test_a_file_that_grows_is_rotated_and_cut_is_read_whole(tmp_path: Path) -> None:
    path, seen = tmp_path / "log.jsonl", list[bytes]()
    path.write_bytes(b"1\n2")
    lines = growing(path, follow=True, poll=0.005)

    def read() -> None:
        seen.extend(line.strip() for line in iter(lambda: next(lines), b"end\n"))

    def until(count: int) -> None:
        deadline = time.monotonic() + 5
        while len(seen) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.03)  # no more may come

    (thread := threading.Thread(target=read, daemon=True)).start()
    until(1)
    assert seen == [b"1"]
    with path.open("ab") as file:
        file.write(b"2\n3\n")
    until(3)
    assert seen == [b"1", b"22", b"3"]
    path.write_bytes(b"4\n")  # cut, and shorter
    until(4)
    with path.open("ab") as file:
        file.write(b"5")
    os.replace(path, tmp_path / "log.jsonl.1")
    path.write_bytes(b"6\n")
    until(6)
    assert seen[3:] == [b"4", b"5", b"6"]
    with path.open("ab") as file:
        file.write(b"end\n")
    thread.join(5)
    assert not thread.is_alive()


def test_a_log_that_cannot_be_read_is_refused_and_a_mark_of_the_byte_order_is_not(tmp_path: Path) -> None:
    for name, line in (("log.jsonl.gz", "a growing log must be uncompressed; unpack it$"), ("", "no such file")):
        (tmp_path / "log.jsonl.gz").write_bytes(b"")
        with pytest.raises(ValueError, match=line):
            list(growing(tmp_path / name, follow=False, poll=1.0))
    write(path := tmp_path / "log.jsonl", [[1], [2]])
    whole = path.read_bytes()
    path.write_bytes(BOM_UTF8 + whole)
    assert list(growing(path, follow=False, poll=1.0)) == whole.splitlines(keepends=True)


def test_lines_that_say_nothing_are_left_out_until_they_are_most(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "log.jsonl"
    write(path, [[1, 2]] * 30)
    with path.open("a", encoding="utf-8") as file:
        file.write("{broken\n[1]\n\n")
    log = Log(path, config(), None)
    assert len(list(log)) == 30
    assert log.skipped == 2
    assert len(caplog.records) == 1
    path.write_text('{"prompt": "a", "answer": "b"}\n' * 50, encoding="utf-8")
    with pytest.raises(ValueError, match="give run="):
        list(Log(path, config(), None))
    write(path, [[1, 2]] * 60)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"prompt": "a", "answer": "b"}\n' * 30)
    with pytest.raises(ValueError, match="give run="):  # of all lines a third, of those that are watched every one
        list(Log(path, config(), None, begin=60))


def test_the_command_is_quiet_but_for_its_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "log.jsonl"
    few = [f"log={path}", "reference=40", "follow=false"]
    write(path, [[2, 3, 1, 3]] * 30)
    assert run_command(main, "ops/watch", *few) == EARLY
    assert "too few" in capsys.readouterr().err
    write(path, [[2, 3, 1, 3], [3, 3, 2, 1]] * 40)
    assert run_command(main, "ops/watch", *few) == QUIET
    assert capsys.readouterr().out == ""
    write(path, [[1, 0, 0, 1]] * 100, "a")
    assert run_command(main, "ops/watch", *few) == ALARM
    out = capsys.readouterr().out
    assert out.startswith("time to adapt, at request ")
    assert out.count("\n") == 1
    assert run_command(main, "ops/watch", f"log={tmp_path / 'none'}") == 2
    for words in ([], [f"log={path}", "url=http://localhost:1"]):
        assert run_command(main, "ops/watch", *words) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: give what to watch: log=FILE, or url=")


def test_a_head_is_played_along_a_log_as_the_offline_tier_plays_it(runs: Path, tmp_path: Path) -> None:
    """One tree grown at the steps alone gives the counts of one that is grown at every token."""
    evaluation = small(runs, tmp_path, tier="teacher_forced", text="recorded", prompts=4)
    texts = [{"id": str(i), "prompt": f"w{i} w5 w9", "answer": " ".join(f"w{(i * 7 + j * j) % 90}" for j in range(20))}
             for i in range(4)]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, texts)), encoding="utf-8")
    model = json.loads((runs / "eagle" / "config.yaml").read_text(encoding="utf-8"))["model"]
    target = load_target(model_config(**model), "float32", evaluation.engine)
    for tree in ({}, {"kind": "chain", "depth": 3}):
        values = small(runs, tmp_path, tree=tree)
        drafters = load_drafters(values, target)
        rows, _ = teacher_forced_rows(
            evaluation, target, drafters, recorded_texts(evaluation, evaluation, target, [str(path)])
        )
        drafter = load_drafter(resolve_head(str(runs / "eagle")), tree, target, "head")
        watcher = config(max_new_tokens=evaluation.max_new_tokens)
        counts = [replayed(target, drafter, watcher, text, index, "log") for index, text in enumerate(texts)]
        assert sum(count.steps for count in counts) == rows[0].steps
        assert sum(count.tokens for count in counts) == rows[0].tokens


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_servers_counters_are_read_in_windows(engine: str) -> None:
    with Served(engine) as server:
        watch = Server(server.url, ClientConfig(None, True, 5.0, "NO_KEY", {}), "url")
        found: list[SpecDecodingStats] = []
        reader = windows(watch, of_server(server.url, passes=5))
        thread = threading.Thread(target=lambda: found.extend([next(reader), next(reader)]), daemon=True)
        thread.start()
        for index in range(200):
            if not thread.is_alive():
                break
            watch.send(Question(str(index), "/completions", {"prompt": f"p{index}"}), {"max_tokens": 12})
            time.sleep(0.01)
        thread.join(5)
    assert len(found) == 2
    assert all(one.steps >= 5 and 0 < one.accepted < 3 * one.steps for one in found)


def counters(steps: int, accepted: int, started: float = 1.0) -> Counters:
    by_depth = (float(accepted), 0.0, 0.0)
    return Counters("vllm", float(steps), 3.0 * steps, float(accepted), by_depth, None, 1.0, started)


def test_a_restart_begins_a_window_anew_and_a_server_that_is_away_is_waited_for(monkeypatch: Any) -> None:
    readings: Iterator[Any] = iter(
        [counters(100, 50), counters(110, 55), None, ValueError("away"), counters(4, 4, 2.0), counters(30, 6, 2.0)]
    )

    def read(_: Metrics) -> Any:
        reading = next(readings)
        if isinstance(reading, ValueError):
            raise reading
        return reading

    with Served("vllm") as served:
        watch, away = Metrics(served.url, "NO_KEY"), of_server(served.url, passes=20)
        monkeypatch.setattr(Metrics, "counters", read)
        (one,) = [next(windows(watch, away))]
        assert (one.steps, one.accepted) == (26, 2)
        readings = iter([counters(1, 1), ValueError("away")])
        with pytest.raises(ValueError, match="away"):
            next(windows(watch, replace(away, away=1e-9)))
        readings = iter([counters(1, 1), None])
        with pytest.raises(ValueError, match="/metrics has been an error for more than"):
            next(windows(watch, replace(away, away=1e-9)))
        readings = iter([None])
        with pytest.raises(ValueError, match="turn its metrics on"):
            next(windows(watch, replace(away, away=1e-9)))


def test_an_interrupted_watch_ends_with_what_it_knows() -> None:
    def interrupted() -> Iterator[SpecDecodingStats]:
        yield from stream(np.random.default_rng(0), 45, 0.6)
        raise KeyboardInterrupt

    outcome = watched(interrupted(), config())
    assert (outcome.alarm, outcome.requests, outcome.status) == (None, 45, QUIET)
