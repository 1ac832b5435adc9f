"""The README's picture, of a report: how fast each drafter writes, beside the baseline.

python benchmarks/picture.py outputs/tiny-mtp/report.json docs/demo.svg
"""

import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import vl_convert

from eval.report.view import results_of
from eval.report.write import read_report

WIDTH, BAR, INK = 480, 30, "#7b818c"  # a grey that is read on white and on black


def picture(file: Path) -> str:
    """Return the picture as SVG: a bar a drafter, as long as its tokens per second."""
    names = {"plain": "without a head"}
    data = [
        {"name": names.get(row["drafter"], row["drafter"]), "speed": row["tokens_per_second"],
         "text": f"{row['tokens_per_second']:.0f} tokens/s" + f", {row['speedup']:.1f}x" * (row["speedup"] != 1)}
        for row in (result.row for result in results_of(read_report(file)) if result.overall and not result.failed)
        if row["tokens_per_second"] and row["speedup"]
    ]  # fmt: skip
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False, "domain": False}}
    x = {"field": "speed", "type": "quantitative", "axis": None}
    bars = {"mark": {"type": "bar", "size": BAR - 8, "color": "#4c78a8"}, "encoding": {"x": x, "y": y}}
    label = {"type": "text", "align": "left", "dx": 6, "fontSize": 13, "color": INK}
    texts = {"mark": label, "encoding": {"x": x, "y": y, "text": {"field": "text"}}}
    config = {"background": None, "view": {"stroke": None}, "axis": {"labelFontSize": 13, "labelColor": INK}}
    spec = {"data": {"values": data}, "width": WIDTH, "height": BAR * len(data), "layer": [bars, texts]}
    return str(vl_convert.vegalite_to_svg(json.dumps({**spec, "config": config})))


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1])), encoding="utf-8")
