"""Sample answers for the report: the first prompts' text in pieces, each with its source and probabilities."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from data.text.prompts import Prompt
from eval.live.interleaved import Runs
from eval.offline.teacher_forced import unrolled
from heads.base import Features
from heads.common.untrusted import visible
from heads.modules.vocab import scatter_logits
from inference.decode import Generation
from inference.protocol import Drafter
from inference.target.target import Target
from inference.text_stream import TextStream
from inference.verification.sample import Sampling, distribution

ANSWERS = 3
QUESTION = 1500  # characters of a prompt's end
TOP = 3
DIGITS = 4  # significant ones of a probability
ROWS = 256  # positions whose probs over the vocabulary are in memory at a time
LONGEST = 4096  # tokens of a text that a head drafts along: the states of all positions and depths are in memory

Records = list[dict[str, Any]]


class Chance(NamedTuple):
    """Probability of a token under the target and the head that drafted it (None: no head did), and the top tokens."""

    p: float
    q: float | None
    top: list[tuple[str, float]]


def answers(
    runs: Runs, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt], target: Target, temperature: float
) -> Records:
    """Return the drafters' answers to the first prompts in pieces, each with its source and probabilities.

    The first repeat of each prompt counts. The target reads each answer once more; the probabilities of greedy answers
    are those at temperature 1.

    Returns:
        By drafter and prompt the prompt's end, the session's temperature, the steps as [drafted, accepted, committed],
        and the pieces.
    """
    records = []
    for index, prompt in enumerate(prompts[:ANSWERS]):
        question = visible(str(target.tokenizer.decode(prompt.token))[-QUESTION:])
        for name, drafter in drafters.items():
            run = runs[name][index][0]
            steps = [[step.drafted, step.accepted, step.committed] for step in run.steps]
            probabilities = chances(target, drafter, prompt.token, run, temperature or 1.0)
            record = {"drafter": name, "prompt": prompt.id, "question": question, "temperature": temperature}
            records.append({**record, "pieces": pieces(run, target.tokenizer, probabilities), "steps": steps})
    return records


def pieces(run: Generation, tokenizer: Any, probabilities: Sequence[Chance]) -> Records:
    """Return a run's text in pieces of whole characters, each with the source and probabilities of its last token.

    Returns:
        Of each piece its `text`, its `source` ("prefill", "draft" or "bonus"), the number of the `step` that committed
        it, 0 for the prefill, and a `Chance`: `p`, `q` and the most likely tokens there, `top`.
    """
    passes = [0] + [number for number, step in enumerate(run.steps, 1) for _ in range(step.committed)]
    stream, records = TextStream(tokenizer), []
    piece: dict[str, Any] = {}
    for token, source, number, chance in zip(run.tokens, run.sources, passes, probabilities, strict=True):
        piece = {"source": source, "step": number, **chance._asdict()}
        if text := stream.push(token):
            records.append({"text": visible(text), **piece})
    if rest := stream.rest():
        records.append({"text": visible(rest), **piece})
    return records


@torch.inference_mode()
def chances(target: Target, drafter: Drafter, prompt: list[int], run: Generation, temperature: float) -> list[Chance]:
    """Return the probabilities of each token of an answer at a temperature above 0.

    They are those of softmax alone: no token is filtered or penalised. q is computed for heads alone.
    """
    token = torch.tensor(prompt + run.tokens, device=target.device)
    features = target.features(token[None], torch.zeros_like(token)[None], drafter.feature_layers)
    begin, probabilities = len(prompt), []
    head, sampling = drafter.head, Sampling(temperature, 0, 1.0)
    q = {} if head is None or len(token) > LONGEST else drafted(head, features, begin, run, sampling)
    last = features.last[0, begin - 1 : -1]  # a position's logits are those of the token after it
    for first in range(0, len(run.tokens), ROWS):
        probs = distribution(target.embeddings.logits(last[first : first + ROWS]), sampling)
        top_p, top_ids = (values.tolist() for values in probs.topk(min(TOP, probs.shape[-1])))
        actual = token[begin + first : begin + first + ROWS]
        for row, p in enumerate(probs.gather(1, actual[:, None])[:, 0].tolist()):
            texts = (visible(str(target.tokenizer.decode([id_]))) for id_ in top_ids[row])
            top = list(zip(texts, map(rounded, top_p[row]), strict=True))
            probabilities.append(Chance(rounded(p), q.get(first + row), top))
    return probabilities


def drafted(head: Any, features: Features, begin: int, run: Generation, sampling: Sampling) -> dict[int, float]:
    """Return the head's probability of each token that it drafted and the target accepted, by its index in the answer.

    `features` are those of prompt and answer, whose first token is at position `begin`.
    """
    accepted: list[list[int]] = []  # by depth: indices in the answer
    root = 0
    for step in run.steps:
        accepted += [[] for _ in range(step.accepted - len(accepted))]
        for depth in range(1, step.accepted + 1):
            accepted[depth - 1].append(root + depth)
        root += step.committed
    probabilities: dict[int, float] = {}
    drafts = unrolled(head, features, len(accepted)) if accepted else []
    for depth, (draft, indices) in enumerate(zip(drafts, accepted, strict=False), 1):
        for first in range(0, len(indices), ROWS):
            block = indices[first : first + ROWS]
            at = torch.tensor(block, device=features.token.device) + begin
            state = draft.state[0, at - depth - 1]  # the position before the root is the last that the head had seen
            probs = distribution(scatter_logits(head.vocab, head.score(state, depth)), sampling)
            q = probs.gather(1, features.token[0, at][:, None])[:, 0]
            probabilities.update(zip(block, map(rounded, q.tolist()), strict=True))
    return probabilities


def rounded(chance: float) -> float:
    """Return a probability rounded to its significant digits."""
    return float(f"{chance:.{DIGITS}g}")
