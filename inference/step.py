"""One decoding step of a whole batch on its device: draft, forward pass, acceptance, compaction, the head's new rows.

What a step decides stays on the device, in buffers of all slots that are written in place, and its shapes follow from
the tree's policy and the sizes at hand alone. The host reads one small tensor a step: how many tokens each sequence
commits, and which. `Session` with the rules of inference/verification/rules.py is the reference that this is tested
against, and the way of the sources and rules that `fits` does not name.
"""

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import Features
from heads.modules.top_k import argmax
from inference.drafters.policy import Roots
from inference.laps import Laps
from inference.limits import check_size
from inference.protocol import DraftBatch
from inference.session import Session, Settings, Step
from inference.target.cache import BatchCache, roomy
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification import device, verify
from inference.verification.device import Accepted
from inference.verification.rng import key_of, noise_at
from inference.verification.sample import Sampling, distribution, penalize
from inference.verification.tree import DraftTree

GREEDY_RULES = (verify.AUTO, "match", "point_mass", verify.COUPLED)  # at temperature 0 one walk


class Slots(NamedTuple):
    """The sequences' state on the device, by slot.

    Attributes:
        root: the last committed token, which the target has not seen.
        length: entries in the target's cache.
        room: drafted tokens that may still be accepted.
        lacking: tokens before which no end of the answer may come.
        active: 1 of a sequence, 0 of an idle slot.
        key: of the coupled noise.
        seen: which tokens stand in the text, where a penalty asks for it; else of no tokens.
    """

    root: Int[Tensor, "B"]
    length: Int[Tensor, "B"]
    room: Int[Tensor, "B"]
    lacking: Int[Tensor, "B"]
    active: Int[Tensor, "B"]
    key: Int[Tensor, "B"]
    seen: Bool[Tensor, "B V"]


class SlotRoots(Roots):
    """The roots of sequences that are sampled alike, under the noise of the positions below them if coupled."""

    def __init__(self, slots: Slots, sampling: Sampling, noise: Float[Tensor, "B P V"] | None) -> None:
        self.token, self.sampling, self.noise = slots.root[:, None], sampling, noise
        self.seen = slots.seen[:, None] if slots.seen.shape[1] else None
        self.noisy = noise is not None

    def penalized(self, logits: Float[Tensor, "B N W"], seen: Bool[Tensor, "B N W"]) -> Float[Tensor, "B N W"]:
        """Penalise all sequences' logits alike."""
        return penalize(logits, seen, self.sampling)

    def raced(self, logits: Float[Tensor, "B N V"], depth: int) -> Float[Tensor, "B N V"]:
        """Race the probs against the noise of the positions `depth` below the roots."""
        assert self.noise is not None
        return (distribution(logits, self.sampling) / self.noise[:, depth - 1 : depth]).log()


def fits(target: Target, sessions: Sequence[Session]) -> bool:
    """Return whether sequences are decoded by steps on the device: all sampled alike, greedily or coupled.

    The target must take a batch's masks, and its positions must mean the same at every length.
    """
    one, *others = [session.settings for session in sessions]
    if not target.takes_trees or target.switch is not None:
        return False
    if any((other.sampling, other.rule, other.gaps) != (one.sampling, one.rule, one.gaps) for other in others):
        return False
    return one.rule in GREEDY_RULES if one.sampling.temperature == 0 else one.rule == verify.COUPLED


class DeviceStep:
    """The steps of a batch whose drafts grow on the device.

    Attributes:
        static: whether shapes stay the same from step to step, as graphs want it: attention reads up to a stride's end,
            all slots take part, and the host reads what was committed when everything is done. Else it reads first,
            and no more is computed than was committed.
    """

    def __init__(self, target: Target, cache: BatchCache, drafts: DraftBatch, static: bool | None = None) -> None:
        self.target, self.cache, self.drafts = target, cache, drafts
        self.static = target.device.type == "cuda" if static is None else static
        self.slots: Slots | None = None
        self.ends: Tensor | None = None  # which tokens "V" end an answer, where one may not end at once
        self.current: list[Session] = []  # whose state the slots hold

    def enter(self, sessions: Sequence[Session]) -> None:
        """Write the state of sequences to the slots: others came or left, or these were decoded in another way."""
        check_size(self.target, self.drafts.nodes, sessions[0].drafter.name)
        size, on = self.cache.storage.size, self.target.device
        texts = [session.seen() for session in sessions]
        vocab = 0 if texts[0] is None else len(texts[0])
        if self.slots is None or self.slots.seen.shape[1] != vocab:
            seen = torch.zeros(size, vocab, dtype=torch.bool, device=on)
            root, length, room, lacking, active, key = torch.zeros(6, size, dtype=torch.long, device=on)
            self.slots = Slots(root, length, room, lacking, active, key, seen)
        values = [[s.context[-1], s.cache.length, *s.left, 1, key_of(s.settings.seed)] for s in sessions]
        values += [[0, 1, 0, 0, 0, 0]] * (size - len(values))  # what is idle sees one entry: none at all would be NaN
        for buffer, column in zip(self.slots[:6], torch.tensor(values, device=on).T, strict=True):
            buffer.copy_(column)
        for slot, seen_tokens in enumerate(texts):
            if seen_tokens is not None:
                self.slots.seen[slot] = seen_tokens
        self.ends = None
        if self.target.eos and any(session.settings.min_new_tokens for session in sessions):
            self.ends = torch.zeros(self.target.embeddings.vocab_size, dtype=torch.bool, device=on)
            self.ends[sorted(self.target.eos)] = True
        self.drafts.catch_up([session.cache.length for session in sessions])
        self.current = list(sessions)

    @torch.inference_mode()
    def step(self, sessions: Sequence[Session]) -> None:
        """Decode one step of sequences, in the order of their slots."""
        if len(sessions) != len(self.current) or any(a is not b for a, b in zip(sessions, self.current, strict=True)):
            self.enter(sessions)
        assert self.slots is not None
        laps, settings = Laps(self.target.device), sessions[0].settings
        laps.mark(None)
        slots = self.slots if self.static else Slots(*(buffer[: len(sessions)] for buffer in self.slots))
        longest = max(session.cache.length for session in sessions)
        self.drafts.begin(len(sessions), longest)
        result, tree, out, accepted = self.run(slots, self.reach(longest), settings, laps)
        rows = result.tolist()  # the one place where the host waits for the device
        begin = time.perf_counter()
        steps = [self.emit(session, row) for session, row in zip(sessions, rows, strict=False)]
        emitting = time.perf_counter() - begin
        if not self.static and not all(session.generation.finish for session in sessions):
            laps.mark(None)  # what the host did since is counted by its own clock
            self.commit(slots, tree, out, accepted, max(row[0] for row in rows), laps)
        seconds = laps.seconds()
        seconds["other"] += emitting  # meanwhile a device waits
        for session, step in zip(sessions, steps, strict=True):
            draft, verified, other = (seconds[name] / len(sessions) for name in ("draft", "verify", "other"))
            session.took(step._replace(draft_s=draft, verify_s=verified, other_s=other))

    def reach(self, longest: int) -> int:
        """Return how many entries attention reads, in static shapes; else how many there are before a tree."""
        if not self.static:
            return longest
        end, capacity = longest + self.drafts.nodes, self.cache.storage.capacity
        return end if end > capacity else min(roomy(end), capacity)

    def run(
        self, slots: Slots, reach: int, settings: Settings, laps: Laps
    ) -> tuple[Int[Tensor, "B X"], DraftTree, TargetOutput, Accepted]:
        """Run a step on the device; return what the host reads, and what is left to commit."""
        self.drafts.hold(reach)
        noise = self.noise(slots, settings.sampling)
        roots = SlotRoots(slots, settings.sampling, noise)
        tree, above = self.drafts.ranked(roots, slots.room, waits=not self.static)
        laps.mark("draft")
        depth = (above.sum(-1) - 1).expand_as(tree.token)
        out = self.forward(slots, tree, above, depth, reach)
        scores = self.processed(slots, tree, above, depth, out, settings)
        laps.mark("verify")
        if noise is None:
            best = argmax(scores)
        else:
            race = noise.gather(1, depth[..., None].expand(-1, -1, noise.shape[2]))
            best = (distribution(scores, settings.sampling) / race).argmax(-1)
        if not self.drafts.deepest:  # nothing to accept
            root = torch.zeros_like(best)
            accepted = Accepted(root, slots.active, best)
            results = [slots.active[:, None], root, best, root]
        else:
            accepted = device.follow(tree, above, best, slots.room, self.drafts.deepest)
            accepted = accepted._replace(committed=accepted.committed * slots.active)
            drafted = ((depth <= slots.room[:, None]) & (tree.token >= 0)).sum(1) - 1
            ranks = device.ranks(tree).gather(1, accepted.path)
            results = [accepted.committed[:, None], drafted[:, None], accepted.token, ranks]
        if settings.gaps:
            best_two = scores.take_along_dim(accepted.path[..., None], 1).float().topk(2).values
            results.append((best_two[..., 0] - best_two[..., 1]).view(torch.int32).long())
        result = torch.cat(results, 1)
        laps.mark("other")
        if self.static:
            self.commit(slots, tree, out, accepted, accepted.path.shape[1], laps)
        return result, tree, out, accepted

    def noise(self, slots: Slots, sampling: Sampling) -> Float[Tensor, "B P V"] | None:
        """Return the noise of the positions below the roots, if the sequences are coupled."""
        if sampling.temperature == 0:
            return None
        position = slots.length[:, None] + 1 + torch.arange(self.drafts.deepest + 1, device=slots.root.device)
        return noise_at(slots.key[:, None].expand_as(position), position, self.target.embeddings.vocab_size)

    def forward(
        self, slots: Slots, tree: DraftTree, above: Bool[Tensor, "#B N N"], depth: Int[Tensor, "B N"], reach: int
    ) -> TargetOutput:
        """Run the target over the trees, whose entries come behind each sequence's own."""
        count, size = tree.token.shape
        # What lies beyond the context is run at its last position, and never accepted.
        position = (slots.length[:, None] + depth).clamp_max(self.target.context - 1)
        token, layers = tree.token.clamp_min(0), self.drafts.feature_layers
        if count == 1 and not self.static and self.target.compiled is None:
            seen = None
            if size > 1:
                seen = torch.cat([above.new_ones(1, size, reach), above], 2)
            return self.target.run(token, position, seen, self.cache.active[0], layers)
        end = reach if self.static else reach + size
        columns = slots.length[:, None] + torch.arange(size, device=token.device)
        seen, column = _layout(slots.length, above, depth, end)
        return self.target.run(token, position, seen, self.cache.over(columns, end), layers, column)

    def processed(
        self,
        slots: Slots,
        tree: DraftTree,
        above: Bool[Tensor, "#B N N"],
        depth: Int[Tensor, "B N"],
        out: TargetOutput,
        settings: Settings,
    ) -> Float[Tensor, "B N V"]:
        """Return the logits as each node's own prefix has them: penalised, and no end before its time."""
        logits = self.target.embeddings.logits(out.last)
        if slots.seen.shape[1]:
            path = torch.where(above, tree.token[:, None], slots.root[:, None, None])  # the root is seen in any case
            seen = slots.seen[:, None].expand(-1, logits.shape[1], -1).scatter(2, path.clamp_min(0), True)
            logits = penalize(logits, seen, settings.sampling)
        if self.ends is not None:
            early = (depth < slots.lacking[:, None])[..., None]
            logits = logits.masked_fill(early & self.ends, float("-inf"))
        return logits

    def commit(
        self, slots: Slots, tree: DraftTree, out: TargetOutput, accepted: Accepted, most: int, laps: Laps
    ) -> None:
        """Compact the cache to the accepted paths, move the slots on, and hand the drafts the accepted rows.

        `most` is at least how many tokens any sequence commits.
        """
        step = torch.arange(most, device=tree.token.device)
        row = torch.arange(len(tree.token), device=step.device)[:, None]
        path, token = accepted.path[:, :most], accepted.token[:, :most]
        if not self.drafts.chain:
            first = slots.length[:, None]
            self.cache.storage.compact(row, first + path, first + step)
        last = (accepted.committed[:, None] - 1).clamp_min(0)
        slots.root.copy_(token.gather(1, last)[:, 0])
        slots.length.add_(accepted.committed)
        slots.room.sub_(accepted.committed)
        slots.lacking.sub_(accepted.committed)
        if slots.seen.shape[1]:
            slots.seen.scatter_(1, torch.where(step <= last, token, slots.root[:, None]), True)
        laps.mark("other")
        if not self.drafts.deepest:
            self.drafts.defer(token, out, accepted.committed)
            return
        rows = Features(token, out.hidden[row, path], out.last[row, path], torch.zeros_like(token))
        self.drafts.extend(rows, token, accepted.committed)
        laps.mark("draft")

    def emit(self, session: Session, row: list[int]) -> Step:
        """Emit what a sequence has committed; return its step, without seconds."""
        (count, drafted), rest = row[:2], row[2:]
        size = self.drafts.deepest + 1
        token, ranks, bits = rest[:count], rest[size : 2 * size], rest[2 * size :][:count]
        gaps = list(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits)))
        session.cache.set_length(len(session.context) - 1 + count)  # of which the last one is the next root
        committed = session.emit(token, ["draft"] * (count - 1) + ["bonus"], gaps)
        accepted = min(count - 1, committed)
        rule = verify.GREEDY_WALK
        if session.settings.sampling.temperature > 0:
            rule = verify.label(session.settings.rule)
        rule = rule if drafted else verify.NOTHING
        return Step(drafted, accepted, committed, 0.0, 0.0, 0.0, rule, tuple(ranks[1 : accepted + 1]))


def _layout(
    length: Int[Tensor, "B"], above: Bool[Tensor, "#B N N"], depth: Int[Tensor, "B N"], end: int
) -> tuple[Bool[Tensor, "B N S"], Int[Tensor, "B S"]]:
    """Return which of the first S = `end` entries each node sees, and the entries' positions.

    A tree's entries stand behind the sequence's own; behind them nothing is seen.
    """
    size = depth.shape[1]
    column = torch.arange(end, device=length.device) - length[:, None]  # counted from the root's
    node, within = column.clamp(0, size - 1), (column >= 0) & (column < size)
    on_path = above.expand(len(length), -1, -1).gather(2, node[:, None].expand(-1, size, -1))
    seen = (column < 0)[:, None] | (within[:, None] & on_path)
    return seen, length[:, None] + torch.where(within, depth.gather(1, node), column)
