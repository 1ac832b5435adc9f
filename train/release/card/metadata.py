"""The card's YAML metadata, by which the Hub finds a head and shows its results."""

from huggingface_hub import EvalResult, ModelCardData

from eval.report.view import without_ending
from heads.formats.hub import REPO
from heads.formats.published.export import FORMATS, READERS
from train.release.card.facts import Facts

TASK = "text-generation"
METRICS = {"tau": "τ, tokens of a target pass", "speedup": "speedup over autoregressive decoding"}


def of(facts: Facts) -> ModelCardData:
    """Return the metadata, checked by huggingface_hub's own types."""
    measured = results(facts)
    return ModelCardData(
        license=facts.publish.license,
        base_model=facts.model,
        datasets=datasets(facts) or None,
        library_name="headstart",
        pipeline_tag=TASK,
        tags=["speculative-decoding", "draft-head", facts.kind, *_readers(facts)],
        model_name=facts.publish.repo.split("/")[1] if measured else None,
        eval_results=measured or None,
    )


def datasets(facts: Facts) -> list[str]:
    """Return the Hub data sets that the head was trained on, as its provenance names them."""
    sources = facts.provenance.get("sources") or []
    names = [str(source["name"]).partition(":")[0] for source in sources if "revision" in source]
    return sorted({name for name in names if REPO.fullmatch(name)})


def results(facts: Facts) -> list[EvalResult]:
    """Return the head's own results by decoding, a failed one without its speedup."""
    evaluations = []
    for result in facts.mine:
        row = result.row
        workload, rate = without_ending(row["workload"]), row.get("request_rate")
        where = f"T={row['temperature']:g}, batch {row['batch_size']}, tree {row['tree']}"
        where += f", {rate:g} requests a second" if rate is not None else ""
        where += f", {row['category']}" if row.get("category") else ""
        for metric, name in METRICS.items():
            if row[metric] is None or (metric == "speedup" and result.failed):
                continue
            ends = [round(end, 4) for end in row[f"{metric}_ci"] or ()]
            uncertain = len({*ends}) > 1  # of no width where requests are alike or too few, which is no certainty
            evaluations.append(
                EvalResult(
                    task_type=TASK,
                    dataset_type=workload,
                    dataset_name=workload,
                    dataset_config=where,
                    metric_type=metric,
                    metric_name=name,
                    metric_value=round(row[metric], 4),
                    metric_args={"interval_95": ends} if uncertain else None,
                )
            )
    return evaluations


def _readers(facts: Facts) -> list[str]:
    """Return the engines whose format this is: those that share its writer and take this head."""
    if facts.publish.format is None:
        return []
    writer = FORMATS[facts.publish.format][facts.kind]
    return [name for name in READERS if FORMATS[name].get(facts.kind) is writer and name not in facts.refused]
