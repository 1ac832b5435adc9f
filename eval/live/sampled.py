"""The gate above temperature 0: the same tokens under coupled noise, and the law of tokens drawn under the rule in use.

Under coupled noise (arXiv 2408.07978) a token follows from the text before it and the seed alone, so every drafter must
emit plain decoding's tokens, one for one: that covers the engine. What a rule adds to it, coins and residuals, is
covered by draws: many verifications after fixed texts, whose first tokens must follow the target's law there. As many
draws of a rule that is known to be broken, which draws anew after a rejection, must fail the same test.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from data.text.prompts import Prompt
from eval.live.interleaved import PLAIN, Runs, measure
from eval.measures import chi_square
from eval.measures.chi_square import Cells, LawTest
from eval.measures.losslessness import EPSILON, Divergence, Gate, SampledGate, divergence, gate, verdict_of, worst
from inference.decode import Generation, Settings
from inference.drafters.plain import Plain
from inference.protocol import Commit, Context, Drafter, Proposal
from inference.session import Session
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.rng import Coupled, Generator, Rng, hashed
from inference.verification.sample import distribution
from inference.verification.tree import DraftTree, children
from inference.verification.verify import COUPLED, decide

PREFIXES = 2  # texts after which tokens are drawn
CANDIDATES = 12  # texts that are looked at for them
DEPTH = 2  # of drafts that are drawn anew for every token: what stands deeper cannot change the first one


class Place(NamedTuple):
    """A text to draw after: where its session stands, what was drafted there, and the target's law there."""

    session: Session
    proposal: Proposal
    logits: Float[Tensor, "N V"]
    law: Float[Tensor, "V"]
    cells: Cells


def sampled_gates(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    settings: Settings,
    tv: float,
    tests: int,
    sizes: Sequence[int] = (1,),
) -> list[SampledGate]:
    """Return the verdict on every drafter at the settings' temperature.

    Coupled tokens are compared with plain decoding of each prompt alone, at every batch size: a token's noise follows
    from its text and the seed, whoever else is in the batch. Draws are made of one sequence.

    Args:
        target: the frozen target.
        drafters: the draft sources by name.
        prompts: what to decode.
        settings: a temperature above 0, and the rule in use.
        tv: the total variation that the draws must reveal.
        tests: how many tests of a report share the error probability.
        sizes: further batch sizes; 1 is always among them.
    """
    coupled = replace(settings, rule=COUPLED, lossy=False, gaps=True)
    all_sizes = tuple(sorted({1, *sizes}))
    runs = {size: _once(measure(target, drafters, prompts, coupled, 1, (), False, size)) for size in all_sizes}
    plain, made = runs[1][PLAIN], []
    for name, drafter in drafters.items():
        equal = {size: coupled_gate(target, plain, each[name], prompts, coupled) for size, each in runs.items()}
        failed_at = next((size for size, found in equal.items() if found.failed), None)
        test, why = law_test(target, drafter, list(texts(prompts, plain)), settings, tv, chi_square.ALPHA / tests)
        merged = worst(list(equal.values()))
        made.append(SampledGate(name, settings.sampling.temperature, merged, test, why, all_sizes, failed_at))
    return made


def _once(runs: Runs) -> dict[str, list[Generation]]:
    """Return the only repeat of each prompt."""
    return {name: [repeats[0] for repeats in each] for name, each in runs.items()}


def coupled_gate(
    target: Target, plain: Sequence[Generation], drafted: Sequence[Generation], prompts: Sequence[Prompt], how: Settings
) -> Gate:
    """Compare runs under coupled noise; a near tie is one in the race of the tokens, law over noise."""
    found = gate(plain, drafted, [prompt.id for prompt in prompts], target.dtype)
    if found.identical == found.checked:
        return found
    verdicts: list[str] = []
    ties: list[Divergence] = []
    failures: list[Divergence] = []
    for ours, theirs, prompt in zip(plain, drafted, prompts, strict=True):
        parted = divergence(ours, theirs, prompt.id)
        if parted is None:
            verdicts.append("identical")
            continue
        both = parted.plain is not None and parted.drafted is not None
        gap = race_gap(target, prompt.token, ours.tokens[: parted.position], how) if both else None
        tied = gap is not None and gap < EPSILON[target.dtype]
        verdicts.append("near_tie" if tied else "failed")
        (ties if tied else failures).append(replace(parted, gap=gap))
    return verdict_of(verdicts, ties, failures)


@torch.inference_mode()
def race_gap(target: Target, prompt: list[int], answer: list[int], how: Settings) -> float:
    """Return by how much, in logits, the winner of the coupled race after a text beats the second."""
    session = _session(target, Plain(target.device), prompt, answer, how)
    out = target.prefill(torch.tensor(session.context, device=target.device), session.cache)
    assert out.logits is not None
    logits = session.processed(out.logits[0, -1:], trees.root(session.context[-1], target.device))
    noise = Coupled(how.seed, target.device, lambda: len(session.context))
    first, second = noise.race(distribution(logits, how.sampling))[0].double().topk(2).values.tolist()
    return float(how.sampling.temperature * torch.log(torch.tensor(first / second))) if second > 0 else float("inf")


def texts(prompts: Sequence[Prompt], plain: Sequence[Generation]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts with the beginning of their answers, up to where the target hesitates most; such texts first."""
    places = []
    for prompt, run in zip(prompts, plain, strict=True):
        open_ = run.gaps[1:]  # a draft is made after one answered token at the earliest
        if open_:
            at = min(range(len(open_)), key=open_.__getitem__) + 1
            places.append((run.gaps[at], prompt.token, run.tokens[:at]))
    for _, prompt_tokens, answer in sorted(places, key=lambda place: place[0])[:CANDIDATES]:
        yield prompt_tokens, answer


@torch.inference_mode()
def law_test(
    target: Target,
    drafter: Drafter,
    candidates: Sequence[tuple[list[int], list[int]]],
    settings: Settings,
    tv: float,
    alpha: float,
) -> tuple[LawTest | None, str]:
    """Draw next tokens after a few texts, and hold them against the target's law there.

    Returns:
        The test; or None, and why there is none.
    """
    found = [place for text in candidates if (place := _place(target, drafter, text, settings, tv)) is not None]
    if any(place.proposal.q is not None for place in found) and not drafter.redraws:
        return None, "no draws: its drafts are drawn by a model with a state of its own"
    places = sorted(found, key=lambda place: -drafted_share(place.proposal.tree, place.law))[:PREFIXES]
    if not places:
        return None, "no draws: at no prompt was anything drafted where the target has a choice"
    each = chi_square.draws_for([place.cells for place in places], tv, alpha)
    freedom = sum(place.cells.freedom for place in places)
    careless = Generator(hashed(f"{settings.seed} control"), target.device)
    total = control = 0.0
    for place in places:
        total += chi_square.statistic(place.cells, _draws(place, settings, each))
        control += chi_square.statistic(place.cells, redrawn(place.law, careless, each))
    p, draws = chi_square.p_value(total, freedom), each * len(places)
    caught = chi_square.p_value(control, freedom)
    return LawTest(draws, len(places), freedom, total, p, tv, chi_square.POWER, alpha, caught), ""


def _session(target: Target, drafter: Drafter, prompt: list[int], answer: list[int], how: Settings) -> Session:
    """Return a session that has the text of a prompt and of its answer so far, and no rows yet."""
    session = Session(target, drafter, prompt, how)
    session.context.extend(answer)
    session.generation.tokens.extend(answer)
    if session.seen is not None:
        session.seen[answer] = True
    return session


def _place(
    target: Target, drafter: Drafter, text: tuple[list[int], list[int]], settings: Settings, tv: float
) -> Place | None:
    """Return a text with a draft after it, None where nothing is drafted or the law leaves a wrong rule no room."""
    place = _placed(target, drafter, _session(target, drafter, *text, settings), settings)
    return place if len(place.proposal.tree.token) > 1 and place.cells.freedom > 0 and harm(place.law) > tv else None


def _placed(target: Target, drafter: Drafter, of: Session, settings: Settings) -> Place:
    """Run a session's text, let the drafter read and draft, and let the target score the draft in one tree pass."""
    made = len(of.generation.tokens)
    text = of.context
    session = _session(target, drafter, text[: len(text) - made], text[len(text) - made :], settings)
    session.state = drafter.start(text[:-1])
    token = torch.tensor(text, device=target.device)
    out = target.prefill(token[:-1], session.cache, drafter.feature_layers)
    session.state.update(Commit(token[1:], out, None))
    root = trees.root(text[-1], target.device)
    expected = distribution(_scored(session, Proposal(root)), settings.sampling)[0]
    proposal = session.draft()
    if proposal.q is not None and drafter.redraws:  # what is deep in a draft costs time alone
        session.limit = min(session.limit, made + 1 + DEPTH)
        proposal = session.draft()
    logits = _scored(session, proposal)
    return Place(session, proposal, logits, expected, chi_square.cells(expected))


def _scored(session: Session, proposal: Proposal) -> Float[Tensor, "N V"]:
    """Return the target's processed logits after each node, and take its rows out of the cache again."""
    if proposal.entered is None:
        out = session.target.score(proposal.tree, session.cache, proposal.look_ahead)
    else:
        out = session.target.parts.score_from(proposal.entered, proposal.tree, session.cache)
    session.cache.keep(len(session.context) - 1, [])
    assert out.logits is not None
    return session.processed(out.logits[0, : len(proposal.tree.token)], proposal.tree)


def _draws(place: Place, settings: Settings, count: int) -> list[int]:
    """Return first tokens as the rule in use emits them."""
    session, sampling = place.session, settings.sampling
    device, start = session.target.device, len(session.context)
    room = session.limit - len(session.generation.tokens) - 1
    known: dict[tuple[int, ...], Tensor] = {(): place.logits[0]}
    drawn: list[int] = []
    rng: Rng = Generator(hashed(f"{settings.seed} law"), device)
    proposal, logits = place.proposal, place.logits
    for draw in range(count):
        if settings.rule == COUPLED:  # its noise is the seed's, so every draw has a seed of its own
            rng = Coupled(hashed(f"{settings.seed} law {draw}"), device, lambda: start)
        if proposal.q is not None:
            proposal = session.state.propose(Context(session.context, sampling, rng, room, session.cache))
            logits = _looked_up(session, proposal, known)
        how = settings.rule, proposal.replacement
        path, token, _ = decide(proposal.tree, logits, proposal.q, sampling, rng, *how)
        drawn.append(int(proposal.tree.token[path[1]]) if len(path) > 1 else token)
    return drawn


def _looked_up(session: Session, proposal: Proposal, known: dict[tuple[int, ...], Tensor]) -> Float[Tensor, "N V"]:
    """Return the logits at a draft's nodes; the target runs only where the root or a child of it is new.

    Deeper nodes get the root's: they decide what follows the first token.
    """
    tree = proposal.tree
    below = [(int(token),) for token in tree.token[children(tree)[0]]]
    if any(text not in known for text in below):
        scored = _scored(session, proposal)
        known.update(zip(below, scored[children(tree)[0]], strict=True))
    rows = [known[()]] * len(tree.token)
    for node, text in zip(children(tree)[0], below, strict=True):
        rows[node] = known[text]
    return torch.stack(rows)


def redrawn(target_law: Float[Tensor, "V"], rng: Generator, count: int) -> list[int]:
    """Return first tokens under a broken rule: where the draft is rejected, the whole law is drawn from once more.

    The draft is the target's likeliest token, whatever the drafter has: a rule that breaks the law shows there.
    """
    best = int(target_law.argmax())
    accepted = [rng.accept(float(target_law[best])) for _ in range(count)]
    drawn = rng.sample(target_law.expand(count, -1))
    return [best if kept else token for kept, token in zip(accepted, drawn, strict=True)]


def harm(target_law: Float[Tensor, "V"]) -> float:
    """Return the total variation between the broken rule's law and the target's."""
    best = float(target_law.max())
    return best * (1 - best)


def drafted_share(tree: DraftTree, target_law: Float[Tensor, "V"]) -> float:
    """Return the target's probability of what was drafted for the next token."""
    return float(target_law[tree.token[children(tree)[0]].unique()].sum())
