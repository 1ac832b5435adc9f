"""What the drafters made of the first prompts: who wrote each piece, and how probable it was to target and head."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

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

ANSWERS = 3
QUESTION = 1500  # characters of a prompt's end
LIKELIEST = 3
DIGITS = 4  # significant ones of a probability
ROWS = 256  # whose laws over the vocabulary are held at a time
LONGEST = 4096  # tokens of a text that a head drafts along: it holds the states of all rows and depths at once

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Chance:
    """How probable a token was: to the target, to the head that drafted it (None where none did), and what else was."""

    p: float
    q: float | None
    top: list[tuple[str, float]]


def answers(
    made: Runs, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt], target: Target, temperature: float
) -> Records:
    """Return what the drafters made of the first prompts, piece by piece with who wrote it and how probable it was.

    Args:
        made: by name, by prompt, the repeats; the first counts.
        drafters: those to show.
        prompts: in the same order.
        target: the target, which reads each answer once more.
        temperature: of the session; the probabilities of greedy answers are those at 1.

    Returns:
        By drafter and prompt the prompt's end, the session's temperature, the steps as [drafted, accepted, committed],
        and the pieces.
    """
    found = []
    for index, prompt in enumerate(prompts[:ANSWERS]):
        question = visible(str(target.tokenizer.decode(prompt.token))[-QUESTION:])
        for name, drafter in drafters.items():
            run = made[name][index][0]
            steps = [[step.drafted, step.accepted, step.committed] for step in run.steps]
            known = chances(target, drafter, prompt.token, run, temperature or 1.0)
            told = {"drafter": name, "prompt": prompt.id, "question": question, "temperature": temperature}
            found.append({**told, "pieces": pieces(run, target.tokenizer, known), "steps": steps})
    return found


def pieces(run: Generation, tokenizer: Any, known: Sequence[Chance]) -> Records:
    """Return a run's text in pieces of whole characters, each with what is known of its last token.

    Args:
        run: the answer.
        tokenizer: the target's.
        known: how probable each of its tokens was.

    Returns:
        Of each piece its `text`, its `source` ("prefill", "draft" or "bonus"), the number of the `step` that committed
        it, 0 for the prefill, and a `Chance`: `p`, `q` and the likeliest tokens there, `top`.
    """
    passes = [0] + [number for number, step in enumerate(run.steps, 1) for _ in range(step.committed)]
    stream, found = TextStream(tokenizer), []
    piece: dict[str, Any] = {}
    for token, source, number, chance in zip(run.tokens, run.sources, passes, known, strict=True):
        piece = {"source": source, "step": number, **asdict(chance)}
        if text := stream.push(token):
            found.append({"text": visible(text), **piece})
    if rest := stream.rest():
        found.append({"text": visible(rest), **piece})
    return found


@torch.inference_mode()
def chances(target: Target, drafter: Drafter, prompt: list[int], run: Generation, temperature: float) -> list[Chance]:
    """Return how probable each token of an answer was, by softmax alone: no token is filtered or penalised.

    Args:
        target: the target, which runs over prompt and answer once.
        drafter: who drafted; only a head's own probabilities are known.
        prompt: its tokens.
        run: the answer to it.
        temperature: of both laws, above 0.
    """
    token = torch.tensor(prompt + run.tokens, device=target.device)
    features = target.features(token[None], torch.zeros_like(token)[None], drafter.feature_layers)
    begin, found = len(prompt), []
    head = drafter.head
    q = {} if head is None or len(token) > LONGEST else drafted(head, features, begin, run, temperature)
    last = features.last[0, begin - 1 : -1]  # a row's law is that of the token after it
    for first in range(0, len(run.tokens), ROWS):
        law = softmax(target.embeddings.logits(last[first : first + ROWS]), temperature)
        likely, ids = (part.tolist() for part in law.topk(min(LIKELIEST, law.shape[-1])))
        wanted = token[begin + first : begin + first + ROWS]
        for row, p in enumerate(law.gather(1, wanted[:, None])[:, 0].tolist()):
            texts = (visible(str(target.tokenizer.decode([one]))) for one in ids[row])
            top = [(text, rounded(share)) for text, share in zip(texts, likely[row], strict=True)]
            found.append(Chance(rounded(p), q.get(first + row), top))
    return found


def drafted(head: Any, features: Features, begin: int, run: Generation, temperature: float) -> dict[int, float]:
    """Return the head's probability of each token that it drafted and the target accepted, by its place in the answer.

    Args:
        head: the draft head.
        features: of prompt and answer.
        begin: where the answer begins.
        run: the answer.
        temperature: of the head's law.
    """
    places: list[list[int]] = []  # by depth: of the accepted tokens
    root = 0
    for step in run.steps:
        places += [[] for _ in range(step.accepted - len(places))]
        for depth in range(1, step.accepted + 1):
            places[depth - 1].append(root + depth)
        root += step.committed
    found: dict[int, float] = {}
    drafts = unrolled(head, features, len(places)) if places else []
    for depth, (draft, all_here) in enumerate(zip(drafts, places, strict=False), 1):
        for first in range(0, len(all_here), ROWS):
            here = all_here[first : first + ROWS]
            at = torch.tensor(here, device=features.token.device) + begin
            state = draft.state[0, at - depth - 1]  # the row before the root is the last that the head had seen
            law = softmax(scatter_logits(head.vocab, head.score(state, depth)), temperature)
            q = law.gather(1, features.token[0, at][:, None])[:, 0]
            found.update(zip(here, map(rounded, q.tolist()), strict=True))
    return found


def softmax(logits: Float[Tensor, "T V"], temperature: float) -> Float[Tensor, "T V"]:
    """Return the laws at a temperature above 0, in fp32."""
    return (logits.float() / temperature).softmax(-1)


def rounded(chance: float) -> float:
    """Return a probability as long as it is worth writing."""
    return float(f"{chance:.{DIGITS}g}")
