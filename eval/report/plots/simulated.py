"""The page's plots of what no clock measured: other trees, other loads, and the head along the text."""

from eval.report.plots.results import (
    LINE,
    LOG,
    UNIT,
    Plot,
    Records,
    axis,
    colour,
    layer,
    plot,
    reference,
    tooltip,
    whole,
)
from eval.report.view import Record


def trees(report: Record) -> list[Plot]:
    """Return τ and the predicted speedup of every tree against the nodes that it drafts: the view at equal budget."""
    plots = []
    for name, record in report.get("other_trees", {}).items():
        for key, title in (("tau", "τ"), ("speedup", "predicted speedup")):
            data: Records = [dict(tree) for tree in record["trees"] if tree[key] is not None]
            dots = layer(
                {"type": "point", "size": 45},
                x=axis("nodes", "drafted nodes a step"),
                y=axis(key, title, scale={"zero": False}),
                color=colour("family"),
                shape=colour("family"),
                tooltip=tooltip("family:N", "tree:N", "nodes:Q .2f", "tau:Q .2f", "speedup:Q .2f"),
            )
            if data:
                plots.append(plot(f"{name}: {title} of every tree by the nodes it drafts", data, [dots]))
    return plots


def loads(report: Record) -> list[Plot]:
    """Return the predicted speedups by batch size of each head's own tree, and of the best for each size."""
    data: Records = [
        {
            "name": f"{name}, {called}",
            "batch": prediction["batch_size"],
            "tree": "" if who == "own" else prediction["tree"],
            "speedup": prediction[who],
        }
        for name, record in report.get("other_trees", {}).items()
        for prediction in record.get("loads", [])
        for who, called in (("own", "its own tree"), ("best", "best tree"))
        if prediction[who] is not None
    ]
    sizes = sorted({prediction["batch"] for prediction in data})
    if len(sizes) < 2:
        return []
    line = layer(
        LINE,
        x=axis("batch", "batch size", axis={"values": sizes, "format": "d"}, scale=LOG),
        y=axis("speedup", "predicted speedup", scale={"zero": True}),
        color=colour(),
        tooltip=tooltip("name:N", "tree:N", "batch:Q", "speedup:Q .2f"),
    )
    caption = "Predicted speedup by batch size; where a line falls below the dashed one, speculation no longer pays"
    return [plot(caption, data, [reference("y"), line])]


def along(report: Record) -> list[Plot]:
    """Return acceptance by depth and rank of each head, and n-alpha with P(a >= k) of chains after every token."""
    records = report.get("teacher_forced", {})
    curves: Records = [
        {"name": f"{name}, {called}", "depth": depth, "share": fraction}
        for name, record in records.items()
        for called, key in (("n-alpha", "n_alpha"), ("P(a≥k)", "at_every_token"))
        for depth, fraction in enumerate(record[key], 1)
    ]
    plots = [_heat(name, record) for name, record in records.items()]
    if curves:
        line = layer(
            LINE,
            x=axis("depth", "depth", axis=whole(max(record["depth"] for record in curves))),
            y=axis("share", "share", scale=UNIT),
            color=colour(),
            tooltip=tooltip("name:N", "depth:Q", "share:Q .3f"),
        )
        plots.append(plot("n-alpha by depth n + 1, and P(a≥k) of a chain after every token", curves, [line]))
    return plots


def _heat(name: str, record: Record) -> Plot:
    """Return the share of tokens by depth and rank as squares with their numbers."""
    cells: Records = [
        {"depth": depth, "rank": rank, "share": fraction}
        for depth, row in enumerate(record["rank"], 1)
        for rank, fraction in enumerate(row, 1)
    ]
    x, y = ({"field": field, "type": "ordinal", "axis": {"labelAngle": 0}} for field in ("rank", "depth"))
    shade = {"field": "share", "type": "quantitative", "scale": {**UNIT, "range": [0, 0.8]}, "legend": None}
    square = layer("rect", x=x, y=y, opacity=shade, tooltip=tooltip("depth:O", "rank:O", "share:Q .3f"))
    number = layer({"type": "text", "fontSize": 10}, x=x, y=y, text=tooltip("share:Q .2f")[0])
    caption = f"{name}: the share of the text's tokens by depth and rank of the guess"
    return plot(caption, cells, [square, number], 30 * len(record["rank"]))
