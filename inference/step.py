"""One decoding step of a whole batch on its device: draft, forward pass, acceptance, compaction, the head's new rows.

What a step decides stays on the device, in buffers of all slots that are written in place, and its shapes follow from
the tree's policy and the sizes at hand alone. The host reads one small tensor a step: how many tokens each sequence
commits, and which. `Request` with the rules of inference/verification/rules.py is the reference that this is tested
against, and it decodes what `supports` refuses. Both read the same counter-based random numbers.
"""

import struct
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heads.base import Features
from heads.modules.argmax import argmax
from inference.graphs import Graphs, Stage, StageCache, compiled
from inference.limits import check_size
from inference.phase_timer import PhaseTimer
from inference.protocol import DraftBatch, Roots, inverse_temperature_of
from inference.request import Request, RequestParams, Step
from inference.target.cache import BatchCache, round_up_kv_length
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification import device, verify
from inference.verification.device import Accepted
from inference.verification.rng import ACCEPT_KEY, DRAFT_KEY, Samples, exponential_noise, hash_key, seed_key, uniform
from inference.verification.sample import Sampling, distribution, penalize
from inference.verification.tree import DraftTree


class Slots(NamedTuple):
    """The sequences' state on the device, by slot.

    Attributes:
        root: the last committed token, which the target has not seen.
        length: entries in the target's cache.
        max_draft_depth: drafted tokens that may still be accepted.
        min_tokens_left: tokens before which no end of the answer may come.
        active: 1 of a sequence, 0 of an idle slot.
        key: of all randomness.
        seen_tokens: which tokens stand in the text, where a penalty asks for it; else of no tokens.
    """

    root: Int[Tensor, "B"]
    length: Int[Tensor, "B"]
    max_draft_depth: Int[Tensor, "B"]
    min_tokens_left: Int[Tensor, "B"]
    active: Int[Tensor, "B"]
    key: Int[Tensor, "B"]
    seen_tokens: Bool[Tensor, "B V"]


class SlotRoots(Roots):
    """The roots of sequences that are sampled alike: under the noise of the positions below them if coupled."""

    sampling: Sampling

    def __init__(self, slots: Slots, settings: RequestParams, noise: Float[Tensor, "B P V"] | None) -> None:
        self.token, self.sampling, self.noise = slots.root[:, None], settings.sampling, noise
        self.seen_tokens = slots.seen_tokens[:, None] if slots.seen_tokens.shape[1] else None
        self.inverse_temperature = inverse_temperature_of(settings.sampling)
        random = settings.sampling.temperature > 0
        self.noisy = random and settings.rule == verify.COUPLED
        if random and not self.noisy:
            self.samples = Samples(hash_key(hash_key(slots.key, DRAFT_KEY), slots.length + 1))

    def penalized(self, logits: Float[Tensor, "B N W"], seen_tokens: Bool[Tensor, "B N W"]) -> Float[Tensor, "B N W"]:
        """Penalise all sequences' logits alike."""
        return penalize(logits, seen_tokens, self.sampling)

    def gumbel_scores(self, logits: Float[Tensor, "B N V"], depth: int) -> Float[Tensor, "B N V"]:
        """Return the log of the probs over the noise of the positions `depth` below the roots."""
        assert self.noise is not None
        return (distribution(logits, self.sampling) / self.noise[:, depth - 1 : depth]).log()


def supports(target: Target, requests: Sequence[Request]) -> bool:
    """Return whether sequences are decoded by steps on the device: all sampled alike, by a lossless rule.

    The target must take a batch's masks, its positions must mean the same at every length, and no pass is kept. What
    does not fit decodes the same tokens by itself.
    """
    one, *others = [request.settings for request in requests]
    if not target.takes_trees or target.switch is not None or any(request.settings.passes for request in requests):
        return False
    if any((other.sampling, other.rule, other.gaps) != (one.sampling, one.rule, one.gaps) for other in others):
        return False
    return not verify.is_lossy(one.rule)


class Drafted(NamedTuple):
    """What was drafted for B sequences.

    Attributes:
        tree: their trees "B N".
        ancestor_mask: each node's ancestors, itself included.
        depth: of each node.
        noise: of the P positions below the roots, under which coupled drafts are ranked; None of others.
        q: the probs that children were sampled from, of the M nodes that have some.
    """

    tree: DraftTree
    ancestor_mask: Bool[Tensor, "#B N N"]
    depth: Int[Tensor, "B N"]
    noise: Float[Tensor, "B P V"] | None
    q: Float[Tensor, "B M V"] | None

    def first(self, count: int) -> "Drafted":
        """Return what was drafted for the first sequences."""
        ancestor_mask = self.ancestor_mask if len(self.ancestor_mask) == 1 else self.ancestor_mask[:count]
        noise, q = (None if rows is None else rows[:count] for rows in (self.noise, self.q))
        return Drafted(DraftTree(*(rows[:count] for rows in self.tree)), ancestor_mask, self.depth[:count], noise, q)


class GraphKey(NamedTuple):
    """What tells the shapes and branches of a step's stages from those of others.

    Attributes:
        head_kv_length: entries of its KV cache that the head reads.
        sampling, rule, gaps: of the settings.
        masks_eos: whether an answer may not end yet.
        policy: which tree is drafted.
    """

    head_kv_length: int
    sampling: Sampling
    rule: str
    gaps: bool
    masks_eos: bool
    policy: int


class DeviceStep:
    """The steps of a batch whose drafts grow on the device.

    Attributes:
        static: whether shapes stay the same from step to step, as graphs want it: attention reads up to a stride's end,
            all slots take part, and the host reads what was committed when everything is done. Else it reads first,
            and no more is computed than was committed.
        graphs: what captures the stages, None: they run as they are.
        compiled_stages: what calls the compiled stages.
    """

    def __init__(self, target: Target, cache: BatchCache, drafts: DraftBatch) -> None:
        self.target, self.cache, self.drafts = target, cache, drafts
        self.static = target.device.type == "cuda"
        self.graphs = Graphs(target.device) if target.captures else None
        self.compiled_stages = StageCache()
        self.slots: Slots | None = None
        self.eos_mask: Tensor | None = None  # which tokens "V" end an answer
        self.masks_eos = False  # whether an answer of these may not end at once
        self.current: list[Request] = []  # whose state the slots hold

    def load_slots(self, requests: Sequence[Request]) -> None:
        """Write the state of sequences to the slots: others came or left, or these were decoded in another way."""
        check_size(self.target, self.drafts.max_nodes, requests[0].drafter.name)
        seen_by_slot = [request.seen_tokens() for request in requests]
        slots = self.buffers(0 if seen_by_slot[0] is None else len(seen_by_slot[0]))
        values = [[s.context[-1], s.cache.length, *s.left, 1, seed_key(s.settings.seed)] for s in requests]
        values += [[0, 1, 0, 0, 0, 0]] * (len(slots.root) - len(values))  # idle: of no entry at all came NaN
        for buffer, column in zip(slots[:6], torch.tensor(values, device=self.target.device).T, strict=True):
            buffer.copy_(column)
        for slot, seen_tokens in enumerate(seen_by_slot):
            if seen_tokens is not None:
                slots.seen_tokens[slot] = seen_tokens
        self.masks_eos = bool(self.target.eos) and any(request.settings.min_new_tokens for request in requests)
        self.drafts.catch_up([request.cache.length for request in requests])
        self.current = list(requests)

    def buffers(self, vocab: int) -> Slots:
        """Return the slots, which note `vocab` seen tokens, and have what ends an answer at hand."""
        on = self.target.device
        if self.slots is None or self.slots.seen_tokens.shape[1] != vocab:
            with torch.inference_mode(False):  # compiled stages write to no inference tensor
                root, length, max_draft_depth, min_tokens_left, active, key = torch.zeros(
                    6, self.cache.storage.size, dtype=torch.long, device=on
                )
                seen_tokens = torch.zeros(self.cache.storage.size, vocab, dtype=torch.bool, device=on)
                self.slots = Slots(root, length, max_draft_depth, min_tokens_left, active, key, seen_tokens)
        if self.eos_mask is None:
            self.eos_mask = torch.zeros(self.target.embeddings.vocab_size, dtype=torch.bool, device=on)
            self.eos_mask[sorted(self.target.eos)] = True
        return self.slots

    @torch.inference_mode()
    def step(self, requests: Sequence[Request]) -> None:
        """Decode one step of sequences, in the order of their slots."""
        if len(requests) != len(self.current) or any(a is not b for a, b in zip(requests, self.current, strict=True)):
            self.load_slots(requests)
        assert self.slots is not None
        phase_timer, settings = PhaseTimer(self.target.device), requests[0].settings
        greedy = settings.sampling.temperature == 0
        phase_timer.mark(None)
        slots = self.slots if self.static else Slots(*(buffer[: len(requests)] for buffer in self.slots))
        longest = max(request.cache.length for request in requests)
        self.drafts.begin(len(requests), longest)
        rule = self.rule(settings)
        if self.captures:
            assert self.graphs is not None
            self.graphs.keep([*self.slots, *self.cache.storage.blocks, *self.drafts.tensors()])
        if self.compiles:
            buffers = [*self.cache.storage.blocks, *self.drafts.tensors(), *self.target.embeddings.kept_rows()]
            self.compiled_stages.keep([*self.slots, *buffers])
        kv_length = self.kv_length(longest)
        result, out, accepted = self.run(slots, kv_length, settings, phase_timer)
        rows = result.tolist()  # the one place where the host waits for the device
        begin = time.perf_counter()
        shown = verify.GREEDY_WALK if greedy else rule
        steps = [self.emit(request, row, shown) for request, row in zip(requests, rows, strict=False)]
        emitting = time.perf_counter() - begin
        if not self.static and not all(request.generation.finish for request in requests):
            phase_timer.mark(None)  # what the host did since is counted by its own clock
            max_committed = accepted.path.shape[1] if self.compiles else max(row[0] for row in rows)
            self.commit(slots, out, accepted, max_committed, self.graph_key(kv_length, settings), phase_timer)
        seconds = phase_timer.seconds()
        seconds["other"] += emitting  # meanwhile a device waits
        for request, step in zip(requests, steps, strict=True):
            draft, verified, other = (seconds[name] / len(requests) for name in ("draft", "verify", "other"))
            request.record_step(step._replace(draft_s=draft, verify_s=verified, other_s=other))

    def kv_length(self, longest: int) -> int:
        """Return how many entries attention reads, in static shapes; else how many there are before a tree."""
        if not self.static:
            return longest
        end, capacity = longest + self.drafts.max_nodes, self.cache.storage.capacity
        return end if end > capacity else min(round_up_kv_length(end), capacity)

    @property
    def compiles(self) -> bool:
        """Whether the head's stages are compiled. Their shapes then stay the same too, and take in all slots."""
        return self.target.compiles_drafts and self.drafts.deepest > 0

    @property
    def captures(self) -> bool:
        """Whether the stages are captured in graphs, whose shapes must stay the same."""
        return self.static and self.graphs is not None

    def graph_key(self, kv_length: int, settings: RequestParams) -> GraphKey:
        """Return what tells the shapes and branches of a step's stages from those of others."""
        # Compiled shapes are few: the head reads all entries that a sequence may come to have.
        head_kv_length = (
            round_up_kv_length(self.cache.storage.capacity) if self.compiles and not self.static else kv_length
        )
        return GraphKey(
            head_kv_length, settings.sampling, settings.rule, settings.gaps, self.masks_eos, self.drafts.tree_key
        )

    def launch(self, graph_key: GraphKey, stage: Stage, *args: Any) -> Any:
        """Run a stage of a step under its graph key."""
        run = stage
        if self.compiles and stage in (DeviceStep.draft, DeviceStep.extend, DeviceStep.advance_and_extend):
            run = partial(self.compiled_stages, (stage, *graph_key), compiled(stage, self.target.device.type))
        if not self.captures:
            return run(self, *args)
        assert self.graphs is not None
        return self.graphs((stage, *graph_key), run, self, *args)

    def run(
        self, slots: Slots, kv_length: int, settings: RequestParams, phase_timer: PhaseTimer
    ) -> tuple[Int[Tensor, "B X"], TargetOutput, Accepted]:
        """Run a step on the device; return what the host reads, and what is left to commit."""
        graph_key = self.graph_key(kv_length, settings)
        drafted = self.launch(
            graph_key, DeviceStep.draft, self.slots if self.compiles else slots, graph_key.head_kv_length, settings
        )
        if self.compiles:
            drafted = drafted.first(len(slots.root))
        phase_timer.mark("draft")
        inner = None if self.captures else phase_timer  # no graph holds the time that passes in it
        out, result, accepted = self.launch(graph_key, DeviceStep.evaluate, slots, drafted, kv_length, settings, inner)
        phase_timer.mark("verify" if self.captures else "other")
        if self.static:
            self.commit(slots, out, accepted, accepted.path.shape[1], graph_key, phase_timer)
        return result, out, accepted

    def draft(self, slots: Slots, kv_length: int, settings: RequestParams) -> Drafted:
        """Draft a tree for each sequence."""
        noise, allow_host_sync = self.noise(slots, settings), not (self.static or self.compiles)
        tree, ancestor_mask, q = self.drafts.draft_trees(
            SlotRoots(slots, settings, noise), slots.max_draft_depth, kv_length, allow_host_sync=allow_host_sync
        )
        return Drafted(tree, ancestor_mask, (ancestor_mask.sum(-1) - 1).expand_as(tree.token), noise, q)

    def rule(self, settings: RequestParams) -> str:
        """Return the key of the rule that drafts are verified by."""
        greedy, drafts = settings.sampling.temperature == 0, self.drafts
        if not drafts.deepest:
            return "match"
        parents = None if greedy or settings.rule == verify.COUPLED else drafts.sampled
        chain = drafts.chain if parents is None else verify.is_chain(parents)
        return verify.fitting(settings.rule, chain, parents is not None, greedy)

    def verified(
        self,
        slots: Slots,
        drafted: Drafted,
        present: Bool[Tensor, "B N"],
        logits: Float[Tensor, "B N V"],
        settings: RequestParams,
    ) -> Accepted:
        """Verify sampled drafts by the rule for them; the next token is sampled by the noise of its position."""
        on_device = verify.RULES[self.rule(settings)].on_device
        tree = drafted.tree
        assert self.drafts.sampled is not None
        assert drafted.q is not None
        assert on_device is not None
        draft = device.Sampled(self.drafts.sampled, tree.token, present, drafted.q)
        p, accept_keys = (
            distribution(logits, settings.sampling),
            hash_key(hash_key(slots.key, ACCEPT_KEY), slots.length + 1),
        )
        uniforms = uniform(accept_keys[:, None], torch.arange(p.shape[1], device=p.device))
        last, probs = on_device(draft, p, uniforms, not self.static)
        position = slots.length + 1 + drafted.depth.gather(1, last[:, None])[:, 0]
        token = (probs / exponential_noise(slots.key, position, p.shape[-1])).argmax(-1)
        return device.accepted(tree, drafted.ancestor_mask, last, token, self.drafts.deepest)

    def noise(self, slots: Slots, settings: RequestParams) -> Float[Tensor, "B P V"] | None:
        """Return the noise of the positions below the roots, if drafts are coupled."""
        if settings.sampling.temperature == 0 or settings.rule != verify.COUPLED or not self.drafts.deepest:
            return None
        position = slots.length[:, None] + 1 + torch.arange(self.drafts.deepest + 1, device=slots.root.device)
        return exponential_noise(slots.key[:, None].expand_as(position), position, self.target.embeddings.vocab_size)

    def evaluate(
        self, slots: Slots, drafted: Drafted, kv_length: int, settings: RequestParams, phase_timer: PhaseTimer | None
    ) -> tuple[TargetOutput, Int[Tensor, "B X"], Accepted]:
        """Run the target over the trees and choose what is accepted: one stage, for scores are too large to keep."""
        out = self.forward(slots, drafted, kv_length)
        logits = self.processed(slots, drafted, out, settings.sampling)
        if phase_timer is not None:
            phase_timer.mark("verify")
        return out, *self.accept(slots, drafted, logits, settings)

    def forward(self, slots: Slots, drafted: Drafted, kv_length: int) -> TargetOutput:
        """Run the target over the trees, whose entries come behind each sequence's own."""
        tree, ancestor_mask, depth, *_ = drafted
        count, size = tree.token.shape
        # What lies beyond the context is run at its last position, and never accepted.
        position = (slots.length[:, None] + depth).clamp_max(self.target.context - 1)
        token, layers = tree.token.clamp_min(0), self.drafts.feature_layers
        if count == 1 and not self.static and self.target.compiled is None:
            attn_mask = None
            if size > 1:
                attn_mask = torch.cat([ancestor_mask.new_ones(1, size, kv_length), ancestor_mask], 2)
            return self.target.run(token, position, attn_mask, self.cache.active[0], layers)
        end = kv_length if self.static else kv_length + size
        write_index = slots.length[:, None] + torch.arange(size, device=token.device)
        attn_mask, key_position = _layout(slots.length, ancestor_mask, depth, end)
        batch_pass = self.cache.storage.over(write_index, end, steady=self.static)
        return self.target.run(token, position, attn_mask, batch_pass, layers, key_position)

    def processed(
        self, slots: Slots, drafted: Drafted, out: TargetOutput, sampling: Sampling
    ) -> Float[Tensor, "B N V"]:
        """Return the logits as each node's own prefix has them: penalised, and no end before its time."""
        logits = self.target.embeddings.logits(out.last_hidden)
        if slots.seen_tokens.shape[1]:
            # The root is seen in any case.
            path = torch.where(drafted.ancestor_mask, drafted.tree.token[:, None], slots.root[:, None, None])
            seen_tokens = slots.seen_tokens[:, None].expand(-1, logits.shape[1], -1).scatter(2, path.clamp_min(0), True)
            logits = penalize(logits, seen_tokens, sampling)
        if self.masks_eos:
            assert self.eos_mask is not None
            early = (drafted.depth < slots.min_tokens_left[:, None])[..., None]
            logits = logits.masked_fill(early & self.eos_mask, float("-inf"))
        return logits

    def choose(
        self,
        slots: Slots,
        drafted: Drafted,
        logits: Float[Tensor, "B N V"],
        sampling: Sampling,
        node: Int[Tensor, "B"],
        depth: int,
    ) -> Int[Tensor, "B"]:
        """Return the target's tokens after nodes at a depth: the winners under the noise of the next positions."""
        probs = distribution(logits[torch.arange(len(node), device=node.device), node], sampling)
        if drafted.noise is None:
            return (probs / exponential_noise(slots.key, slots.length + 1 + depth, probs.shape[-1])).argmax(-1)
        return (probs / drafted.noise[:, depth]).argmax(-1)

    def accept(
        self, slots: Slots, drafted: Drafted, logits: Float[Tensor, "B N V"], settings: RequestParams
    ) -> tuple[Int[Tensor, "B X"], Accepted]:
        """Return what the host reads of a step, and the accepted paths."""
        tree, ancestor_mask, depths, _, q = drafted
        greedy = settings.sampling.temperature == 0

        choose = partial(self.choose, slots, drafted, logits, settings.sampling)
        if not self.drafts.deepest:  # nothing to accept
            root = torch.zeros_like(tree.token)
            token = argmax(logits) if greedy else choose(root[:, 0], 0)[:, None]
            accepted = Accepted(root, slots.active, token)
            results = [slots.active[:, None], root, token, root]
        else:
            if greedy and not self.static and len(tree.token) == 1:
                accepted, ranks, count = device.follow_on_host(
                    tree, argmax(logits), slots.max_draft_depth, self.drafts.deepest
                )
            else:
                present = device.present(tree, ancestor_mask, depths, slots.max_draft_depth)
                if greedy:
                    accepted = device.follow(tree, ancestor_mask, present, argmax(logits), self.drafts.deepest)
                elif q is None or verify.RULES[self.rule(settings)].on_device is None:  # a rule that reads no q
                    accepted = device.walk(
                        tree, ancestor_mask, present, choose, self.drafts.deepest, allow_host_sync=not self.static
                    )
                else:
                    accepted = self.verified(slots, drafted, present, logits, settings)
                accepted = accepted._replace(committed=accepted.committed * slots.active)
                ranks, count = device.ranks(tree).gather(1, accepted.path), present.sum(1) - 1
            results = [accepted.committed[:, None], count[:, None], accepted.token, ranks]
        if settings.gaps:
            best_two = logits.take_along_dim(accepted.path[..., None], 1).float().topk(2).values
            results.append((best_two[..., 0] - best_two[..., 1]).view(torch.int32).long())
        return torch.cat(results, 1), accepted

    def commit(
        self,
        slots: Slots,
        out: TargetOutput,
        accepted: Accepted,
        max_committed: int,
        graph_key: GraphKey,
        phase_timer: PhaseTimer,
    ) -> None:
        """Move the slots on by what was accepted, and hand the drafts their rows.

        `max_committed` is at least how many tokens any sequence commits.
        """
        count = accepted.committed
        if self.compiles and not self.static and len(count) == self.cache.storage.size:  # no slot stands idle
            assert self.slots is not None
            self.launch(graph_key, DeviceStep.advance_and_extend, self.slots, out.hidden, out.last_hidden, accepted)
            phase_timer.mark("draft")
            return
        features = self.launch(graph_key, DeviceStep.advance, slots, out, accepted, max_committed)
        phase_timer.mark("other")
        if features is None:
            return
        if (idle := self.cache.storage.size - len(count)) and self.compiles:
            features = Features(*(pad(rows, (0, 0) * (rows.ndim - 1) + (0, idle)) for rows in features[:4]))
            count = pad(count, (0, idle))
        self.launch(graph_key, DeviceStep.extend, features, count)
        phase_timer.mark("draft")

    def advance(self, slots: Slots, out: TargetOutput, accepted: Accepted, max_committed: int) -> Features | None:
        """Compact the cache to the accepted paths and move the slots on; return the rows that drafts learn of."""
        step = torch.arange(max_committed, device=accepted.path.device)
        path, token = accepted.path[:, :max_committed], accepted.token[:, :max_committed]
        row = torch.arange(len(path), device=step.device)[:, None]
        if not self.drafts.chain:
            first = slots.length[:, None]
            self.cache.storage.compact(row, first + path, first + step)
        last = (accepted.committed[:, None] - 1).clamp_min(0)
        slots.root.copy_(token.gather(1, last)[:, 0])
        slots.length.add_(accepted.committed)
        slots.max_draft_depth.sub_(accepted.committed)
        slots.min_tokens_left.sub_(accepted.committed)
        if slots.seen_tokens.shape[1]:
            slots.seen_tokens.scatter_(1, torch.where(step <= last, token, slots.root[:, None]), True)
        if self.drafts.max_nodes == 1:  # of the baseline
            return None
        return Features(token, out.hidden[row, path], out.last_hidden[row, path], torch.zeros_like(token))

    def advance_and_extend(self, slots: Slots, hidden: Tensor, last: Tensor, accepted: Accepted) -> None:
        """Move all slots on and hand the drafts their rows, in one stage: what `advance` launches is small."""
        features = self.advance(slots, TargetOutput(hidden, last, None), accepted, accepted.path.shape[1])
        assert features is not None
        self.extend(features, accepted.committed)

    def extend(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Hand the drafts the accepted rows."""
        self.drafts.commit(features, count)

    def emit(self, request: Request, row: list[int], rule: str) -> Step:
        """Emit what a sequence has committed by a rule; return its step, without seconds."""
        (count, drafted), rest = row[:2], row[2:]
        size = self.drafts.deepest + 1
        token, ranks, bits = rest[:count], rest[size : 2 * size], rest[2 * size :][:count]
        gaps = list(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))) if bits else []
        request.cache.set_length(len(request.context) - 1 + count)  # of which the last one is the next root
        committed = request.emit(token, ["draft"] * (count - 1) + ["bonus"], gaps)
        accepted = min(count - 1, committed)
        rule = rule if drafted else verify.NOTHING
        return Step(drafted, accepted, committed, 0.0, 0.0, 0.0, rule, tuple(ranks[1 : accepted + 1]))


def _layout(
    length: Int[Tensor, "B"], ancestor_mask: Bool[Tensor, "#B N N"], depth: Int[Tensor, "B N"], end: int
) -> tuple[Bool[Tensor, "B N S"], Int[Tensor, "B S"]]:
    """Return which of the first S = `end` entries each node sees, and the entries' positions.

    A tree's entries stand behind the sequence's own; behind them nothing is seen.
    """
    size = depth.shape[1]
    offset = torch.arange(end, device=length.device) - length[:, None]  # counted from the root's
    node, within = offset.clamp(0, size - 1), (offset >= 0) & (offset < size)
    on_path = ancestor_mask.expand(len(length), -1, -1).gather(2, node[:, None].expand(-1, size, -1))
    attn_mask = (offset < 0)[:, None] | (within[:, None] & on_path)
    return attn_mask, length[:, None] + torch.where(within, depth.gather(1, node), offset)
