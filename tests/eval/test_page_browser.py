"""The page in a headless Chromium: it opens, sorts, saves and shows tooltips, in both modes and on a phone."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.eval.test_page import report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a written report."""
    out = tmp_path_factory.mktemp("report")
    report().write(out)
    return out


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
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


def test_a_tap_shows_the_tooltip_that_a_pointer_would(browser: Any, folder: Path) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    view = context.new_page()
    view.goto((folder / "report.html").as_uri())
    view.wait_for_selector("body[data-drawn]")
    figures = [each.bounding_box() for each in view.locator(".tile").first.locator(".big").all()]
    assert len(figures) == 2
    assert all(each["y"] + each["height"] < 800 for each in figures), "both are seen at once"
    unfolded(view)
    view.locator("#plot-depths .mark-symbol path").first.tap()
    view.wait_for_selector("#vg-tooltip-element.visible")
    assert "accepted" in view.inner_text("#vg-tooltip-element")
    place = view.locator("#vg-tooltip-element").bounding_box()
    assert (place["x"], place["width"]) == (0, 390)
    view.locator("#tree h2").tap()
    assert view.locator("#vg-tooltip-element.visible").count() == 0
    context.close()


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
