"""The page says what report.json says, whatever names and answers hold."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from data.text.prompts import Prompt
from eval import extras
from eval.live import Runs, rows
from eval.measures.losslessness import Divergence, Gate
from eval.measures.results import Measurement
from eval.report.sections import sections
from eval.report.view import STAGES
from eval.report.write import Report
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from tests import toys
from tests.eval.stubs import generation

EVIL = "</script><img src=x onerror=alert(1)>"
GREEN, RED = Gate(2, 2, 0, 0), Gate(2, 1, 0, 1, Divergence("p1", 3, 4, 5, 2.5))
TREES = {
    "eagle": TreeConfig("static", 0, 0, 0, [[0], [1], [0, 0], [0, 1]], []),
    EVIL: TreeConfig("dynamic", 3, 4, 8, [], []),
}


def drafters() -> dict[str, Any]:
    """Return a draft source with each tree."""
    head = toys.head("medusa", toys.target())
    return {name: HeadDrafter(head, tree, name) for name, tree in TREES.items()}


def decoded(size: int) -> Runs:
    """Return the runs of a session of a batch size."""
    return {
        "plain": [[generation(6, [(0, 0)] * 5, 1.0 / size)], [generation(8, [(0, 0)] * 7, 1.5)]],
        "eagle": [[generation(6, [(4, 2), (4, 1)], 0.5)], [generation(8, [(4, 2), (4, 2), (4, 0)], 0.9)]],
        EVIL: [[generation(6, [(8, 3), (8, 0)], 0.7)], [generation(8, [(8, 2), (8, 2), (8, 0)], 2.0)]],
    }


def report(gate: Gate = GREEN, temperatures: tuple[float, ...] = (0.0, 1.0), sizes: tuple[int, ...] = (1, 4)) -> Report:
    """Return a report of two drafters, one with a name that would run a script."""
    made = []
    named = drafters()
    gates = {f"{name}{size}": GREEN for name in ("plain", *TREES) for size in ("", " x4")} | {"eagle": gate}
    for temperature in temperatures:
        for size in sizes:
            made += rows(decoded(size), named, gates, Measurement("tiny", temperature, size, 2**20, 0))
    return Report({"name": EVIL}, {"name": "a CPU", "dtype": "float32"}, {"prompts": 2}, gates, made, extras=beside())


def beside() -> dict[str, Any]:
    """Return what stands beside the rows."""
    records = [{"step": i, "loss": 8 / i, "accuracy": [0.1 * i, 0.05 * i]} for i in range(1, 9)]
    measured = [{"step": 4, "tau": 1.5, "tau_ci": [1.2, 1.9]}, {"step": 8, "tau": 2.0, "tau_ci": None}]
    prompts = [Prompt("p0", toys.prompt(0, 5), ""), Prompt(EVIL, toys.prompt(1, 5), "")]
    run = generation(toys.prompt(2, 6), [(4, 2), (4, 1)])
    run.sources[1:3] = ["draft", "draft"]
    shown = extras.answers({name: [[run], [run]] for name in TREES}, list(drafters()), prompts, toys.tokenizer())
    evil = {"text": EVIL, "source": "draft", "step": 2}
    shown[0]["pieces"].append(evil)
    return {
        "training": {"eagle": extras.curves([*records, *measured])},
        "trees": extras.trees(decoded(1), drafters()),
        "answers": shown,
    }


class Reader(HTMLParser):
    """Reads elements, tables and scripts as a browser would."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: dict[str, str] = {}
        self.loaded: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        self.elements.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value and value[0] != "#"]
        if tag == "table":
            self.lines = self.tables.setdefault(str(held["id"]), [])
        elif tag == "tr":
            self.lines.append([])
        elif tag in ("td", "th"):
            self.lines[-1].append("")
            self.inside = "cell"
        elif tag == "script":
            self.inside = held.get("id") or "code"

    def handle_data(self, data: str) -> None:
        if self.inside == "cell":
            self.lines[-1][-1] += data
        elif self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag in ("script", "td", "th") else self.inside


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a written report."""
    out = tmp_path_factory.mktemp("report")
    report().write(out)
    return out


@pytest.fixture(scope="module")
def read(folder: Path) -> Reader:
    """Return the page, read."""
    return Reader((folder / "report.html").read_text(encoding="utf-8"))


def lines(read: Reader, table: str) -> list[dict[str, str]]:
    """Return a table's lines by the titles of its columns."""
    head, *body = read.tables[f"table-{table}"]
    return [dict(zip(head, line, strict=True)) for line in body]


def test_the_page_holds_report_json_and_its_tables_the_numbers(folder: Path, read: Reader) -> None:
    told = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert json.loads(read.scripts["report"]) == told
    content = told["rows"]
    assert len(content) == 12
    for row, line in zip(content, lines(read, "results"), strict=True):
        assert line["τ [95%]"].startswith(f"{row['tau']:.2f}")
        assert line["speedup [95%]"].startswith(f"{row['speedup']:.2f}")
        assert line["tok/s"] == f"{row['tokens_per_second']:.1f}"
    for row, line in zip([row for row in content if row["ladder"]], lines(read, "why"), strict=True):
        stages = [line[title] for title in ("τ (ideal)", "after verification", "after draft", "speedup")]
        assert stages == [f"{row['ladder']['rungs'][stage]:.2f}" for stage in STAGES]


def test_every_renderer_has_the_same_sections_and_tables(folder: Path, read: Reader) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    for section in sections(content):
        if section.table and section.table.lines:
            assert read.tables[f"table-{section.id}"] == [section.table.titles, *section.table.lines]
            assert f"## {section.title}" in text
            assert f"| {' | '.join(section.table.titles)} |" in text


def test_nothing_is_loaded_from_anywhere_and_names_and_answers_stay_text(read: Reader, folder: Path) -> None:
    assert read.loaded == []
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert len(text.encode()) < 3_000_000
    assert EVIL not in text
    assert "img" not in read.elements
    assert text.count("</script>") == text.count("<script")
    assert any(EVIL in line["drafter"] for line in lines(read, "results"))


def test_a_red_gate_greys_and_withholds(tmp_path: Path) -> None:
    report(RED, (0.0,), (1,)).write(tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    (line,) = (line for line in lines(Reader(text), "results") if line["drafter"] == "eagle")
    assert [line[title] for title in ("speedup [95%]", "vs HF")] == ["withheld"] * 2
    assert re.search(r'<section class="tile red">\s*<h2>eagle</h2>\s*<p class="big">withheld</p>', text)
    assert '<tr class="red">' in text
    assert "prompt p1, position 3: token 5 instead of token 4" in text
    assert "eagle" not in {line["drafter"] for line in lines(Reader(text), "why")}
    specs = json.loads(Reader(text).scripts["specs"])
    assert {point["name"] for point in specs["results"]["data"]["values"]} == {EVIL}


def test_a_report_of_plain_decoding_alone_has_a_page(tmp_path: Path) -> None:
    whole = report(sizes=(1,), temperatures=(0.0,))
    replace(whole, rows=whole.rows[:1], gates={}, extras={}).write(tmp_path)
    read = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert set(read.tables) == {"table-results", "table-times"}


def test_there_are_five_plots(read: Reader) -> None:
    specs = json.loads(read.scripts["specs"])
    assert set(specs) == {"results", "depths", "load", "times", "training"}
    curves = {point["name"] for point in specs["training"]["data"]["values"]}
    assert curves == {"eagle, loss", "eagle, τ"}
    times = [point for point in specs["times"]["data"]["values"] if point["name"] == "eagle, T=0"]
    assert [point["activity"] for point in times] == ["verify", "draft", "other"]
    accepted = [point["accepted"] for point in specs["depths"]["data"]["values"] if point["name"] == "eagle, T=0"]
    assert accepted == [0.8, 0.6]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless Chromium, where there is one."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=found, args=["--no-sandbox"])


def unfolded(view: Any) -> None:
    """Open what is folded, and wait for its plots."""
    view.wait_for_selector("body[data-drawn]")
    assert view.locator("#training .plot svg").count() == 0
    view.evaluate("document.querySelectorAll('details.fold').forEach(fold => { fold.open = true })")
    view.wait_for_function("!document.querySelector('.plot:not(:has(svg))')")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1200, "light")])
def test_the_page_works_in_a_browser(browser: Any, folder: Path, width: int, scheme: str) -> None:
    said: list[str] = []
    view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: said.extend([request.url] * (not request.url.startswith("file:"))))
    view.goto((folder / "report.html").as_uri())
    unfolded(view)
    assert view.locator(".plot svg").count() == view.locator(".plot").count() == 5
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    for order in (-1, 1):
        view.click("#table-results th:has-text('τ') button")
        taus = view.eval_on_selector_all("#table-results tbody tr", "rows => rows.map(row => row.cells[4].textContent)")
        values = [float(tau.split()[0]) for tau in taus]
        assert values == sorted(values, reverse=order < 0)
    with view.expect_download() as started:
        view.click("#json")
    assert json.loads(Path(started.value.path()).read_text(encoding="utf-8"))["schema"] == 1
    assert view.evaluate("document.images.length") == 0
    assert said == []
    view.close()


@pytest.mark.slow
def test_text_with_a_script_in_it_is_shown_and_not_run(browser: Any, tmp_path: Path) -> None:
    evil = "</pre></script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    made = report()
    shown = made.extras["answers"][0]
    first = shown["pieces"][0]
    shown["question"] = first["text"] = evil
    names = {"workload": evil, "tree": f"{evil}\x1b[2J\n", "rule": "datum['x'].y[0] {{7*7}} \u202e"}
    rows = [replace(row, **names) for row in made.rows]
    replace(made, target={"name": evil}, settings={**made.settings, evil: evil}, rows=rows).write(tmp_path)
    said: list[str] = []
    view = browser.new_page()
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.goto((tmp_path / "report.html").as_uri())
    unfolded(view)
    assert view.locator("pre.question").first.inner_text() == evil
    assert view.locator("pre.answer").first.locator("span").first.inner_text() == evil
    assert evil in view.locator("h1").inner_text()
    assert view.locator("#table-results tbody tr").first.inner_text().count("<script>") == 1
    assert view.locator(".plot svg").count() == view.locator(".plot").count() == 5
    for plot in view.locator(".plot svg").all():
        plot.hover()  # tooltips of every plot hold names too
    assert view.evaluate("window.ran") is None
    assert said == []
    assert view.evaluate("document.images.length") == 0
    view.close()
