"""The checks by measurement: the head decodes a few prompts, and drafts with other settings along the answers."""

from dataclasses import replace
from typing import Any

from eval.inputs.texts import of_answer
from eval.inputs.workloads import Selection, read_workload, short_name
from eval.measures.results import Row
from heads import HEADS
from inference.decode import Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig, check_tree
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.release.doctor import card, layers, measured
from train.release.doctor.against import Against
from train.release.doctor.config import CheckupConfig
from train.release.doctor.examined import Examined
from train.release.doctor.finding import Finding, unknown
from train.release.doctor.trials import Trials

BUNDLED = "tiny"
CHECKS = ("layers, measured", "tokens, measured", "positions, measured", "rope, measured", "acceptance")


def measure(head: Examined, against: Against, loaded: Any, config: CheckupConfig) -> list[Finding]:
    """Return the findings of the checks by measurement.

    Args:
        head: the head's files.
        against: its target.
        loaded: the head, as `heads.formats.hub.load_found` gives it.
        config: the amount to measure.

    Raises:
        ValueError: the workload that is given cannot be read.
    """
    target = against.whole
    assert target is not None
    drafting, outputs = loaded, layers.as_read(head)
    distinct = {*(outputs or [])}
    if distinct and len(distinct) == len(loaded.feature_layers) and distinct <= {*range(against.layers)}:
        # Our own reader accepts ids that are counted in the other way.
        drafting = type(loaded)(replace(loaded.config, feature_layers=list(outputs or [])), target.embeddings)
        drafting.load_state_dict(loaded.state_dict())
    drafting = drafting.to(device=target.device, dtype=target.dtype).eval()
    try:
        decoded, reported = _decoded(head, target, drafting, config)
    except ValueError as error:
        if config.workload is not None:
            raise
        return [unknown(f"nothing to measure on ({error})")._replace(check=name) for name in CHECKS]
    pairs = zip(decoded.prompts, decoded.generations, strict=True)
    answered = [of_answer(target, prompt, generation.tokens, decoded.settings) for prompt, generation in pairs]
    trials = Trials(target, drafting, [text for text in answered if text.generated > 1])
    by_check = {
        CHECKS[0]: measured.layers(head, trials),
        CHECKS[1]: measured.tokens(head, trials),
        CHECKS[2]: measured.moved(head, trials),
        CHECKS[3]: measured.rope(head, against, trials),
        CHECKS[4]: card.acceptance(head, reported, decoded),
    }
    return [finding._replace(check=name) for name, findings in by_check.items() for finding in findings]


def _decoded(head: Examined, target: Target, drafting: Any, config: CheckupConfig) -> tuple[card.Measured, Row | None]:
    """Decode greedily, with the report's tree and limit where it has them."""
    kind = next(name for name, class_ in HEADS.items() if type(drafting) is class_)
    workload = config.workload or head.prompts or BUNDLED
    chain = TreeConfig("chain", min(config.depth, drafting.max_depth), 0, 0, [], [])
    reported = card.row(head, kind, short_name(workload)) if target.takes_trees else None
    tree = chain if reported is None else card.tree(head, reported.tree) or chain
    check_tree(target, tree, kind)
    read = read_workload(workload, target, Selection(config.prompts, 0, True, "first", True))
    limit = head.report.get("settings", {}).get("max_new_tokens") if reported is not None else None
    settings = Settings(min(limit or config.max_new_tokens, config.max_new_tokens), GREEDY)
    prompts = [prompt.token for prompt in read.prompts]
    generations = speculate(target, HeadDrafter(drafting, tree, kind), prompts, settings)
    return card.Measured(tree, read.name, settings, prompts, generations), reported
