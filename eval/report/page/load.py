"""What the page says of requests that came at a rate: a table, and latencies against the rate."""

from eval.report.page.names import Told
from eval.report.page.plots import Plot, Records, axis, colour, lines, plot
from eval.report.page.tables import Table, column, of_rows, speedup_column

MARKS = ("p50", "p95")
PARTS = {"queue s": "queue_s", "TTFT s": "ttft_s", "latency s": "latency_s"}  # from the arrival on


def table(told: Told) -> Table:
    """Return what the requests of each row waited, where they came at a rate."""
    columns = [column("req/s", "request_rate"), column("capacity", "batch_size")]
    columns += [
        column(f"{title} {mark}", f"by_request.{key}.{mark}", 3) for title, key in PARTS.items() for mark in MARKS
    ]
    columns += [column("tok/s", "tokens_per_second", 1), speedup_column("latency ratio [95%]", told)]
    return of_rows("load", told, columns, lambda row: row.get("request_rate") is not None)


def latencies(told: Told) -> Plot | None:
    """Return the median and the 95th percentile of the latency against the rate, where there are several."""
    data: Records = [
        {"name": name, "rate": row["request_rate"], "mark": mark, "latency": row["by_request"]["latency_s"][mark]}
        for name, row in lines(told, "request_rate")
        for mark in MARKS
    ]
    rates = sorted({each["rate"] for each in data})
    if len(rates) < 2:
        return None
    encoding = {
        "x": axis(
            "rate", "requests a second", axis={"values": rates, "format": "~g"}, scale={"type": "log", "base": 2}
        ),
        "y": axis("latency", "latency, s", scale={"type": "log"}),
        "color": colour(),
        "strokeDash": {"field": "mark", "type": "nominal", "title": None, "legend": {"symbolType": "stroke"}},
        "tooltip": [
            {"field": "name", "type": "nominal"},
            {"field": "mark", "type": "nominal"},
            {"field": "rate", "type": "quantitative", "title": "requests a second"},
            {"field": "latency", "type": "quantitative", "format": ".3f", "title": "latency, s"},
        ],
    }
    layer = {"mark": {"type": "line", "point": {"size": 60}}, "encoding": encoding}
    told_as = "Latency from the arrival to the last token against the rate of requests, median and 95th percentile"
    return plot(told_as, data, [layer])
