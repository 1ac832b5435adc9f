"""One decoding step for a batch: draft, verify forward, accept, compact the KV cache, update the drafter.

The state of a step stays on the device, in buffers over all slots that are written in place, and its shapes depend only
on the tree's policy and the current sizes. The host reads one small tensor a step: how many tokens each sequence
commits, and which. The tests compare it with a loop over one sequence with the same random numbers (tests/oracle.py).
"""

import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from heads.base import Features, Tokens
from heads.modules.vocab import argmax
from heads.shapes import PerSequence
from inference.protocol import DraftBatch, Drafted, DraftInputs, DraftPlan
from inference.request import Pass, PhaseTimer, Request, RequestParams, Step
from inference.target.attention import Ragged
from inference.target.cache import BatchCache, round_up_kv_length
from inference.target.compiled import Graphs, Stage, StageCache, compiled
from inference.target.model import TargetOutput
from inference.target.target import Target, check_size
from inference.verification import rng, rules
from inference.verification import tree as trees
from inference.verification.rules import Accepted, NodeMask, NodeProbs
from inference.verification.sample import Sampling, distribution, process_logits, top2_gap
from inference.verification.tree import LOOK_AHEAD, DraftTree

Requests = Sequence[Request]  # in the order of their slots
HostRows = Int[Tensor, "B X"]  # a step's numbers for the host: two counts, tokens, path, ranks, logit gaps


class Slots(NamedTuple):
    """The sequences' state on the device, by slot.

    Attributes:
        root: the last committed token, which the target has not seen.
        length: entries in the target's cache.
        max_draft_depth: drafted tokens that may still be accepted.
        min_tokens_left: tokens left until min_new_tokens; EOS tokens are masked until then.
        active: 1 for a sequence, 0 for an idle slot.
        rng_key: random key of the request.
        seen_tokens: mask of the tokens that occur in the text, if there is a repetition penalty.
    """

    root: PerSequence
    length: PerSequence
    max_draft_depth: PerSequence
    min_tokens_left: PerSequence
    active: PerSequence
    rng_key: PerSequence
    seen_tokens: Bool[Tensor, "B V"]


class DeviceStep:
    """Runs decoding steps for a batch.

    Attributes:
        fixed_shapes: whether all steps have the same shapes, as CUDA graphs need: the length of keys is padded to a
            bucket, idle slots run, and the host syncs once, at the end. Otherwise it syncs first, and only accepted
            tokens are computed.
        graphs: CUDA graphs of the stages; None if they are not captured.
        compiled_stages: cache of the compiled stages.
    """

    def __init__(self, target: Target, cache: BatchCache, draft_batch: DraftBatch, name: str) -> None:
        self.target, self.cache, self.draft_batch, self.name = target, cache, draft_batch, name
        self.plan = DraftPlan()
        fixed = draft_batch.traits.on_device and target.takes_trees and target.longrope is None
        self.fixed_shapes = target.device.type == "cuda" and fixed
        self.graphs: Any = Graphs(target.device) if target.captures and fixed else None
        self.compiled_stages = StageCache()
        self.masks_eos = False  # whether a request sets min_new_tokens
        self.current: list[Request] = []  # the requests in the slots
        self.has_idle = False  # whether slots are idle in the current pass
        self.penalises = False  # whether it has a repetition penalty

    @cached_property
    def slots(self) -> Slots:
        """The buffers of all slots."""
        size, vocab_size, on = self.cache.storage.size, self.target.embeddings.vocab_size, self.target.device
        with torch.inference_mode(False):  # compiled stages cannot write to inference tensors
            numbers = torch.zeros(6, size, dtype=torch.long, device=on)
            return Slots._make([*numbers, torch.zeros(size, vocab_size, dtype=torch.bool, device=on)])

    def load_slots(self, requests: Requests) -> None:
        """Write the requests' state to the slots, after requests have joined or left."""
        values = [
            [one.token_ids[-1], one.cache.length, one.max_draft_depth, one.min_tokens_left, 1, one.rng_key]
            for one in requests
        ]
        # An idle slot has length 1: attention over no keys gives NaN.
        values += [[0, 1, 0, 0, 0, 0]] * (len(self.slots.root) - len(values))
        for buffer, column in zip(self.slots[:6], torch.tensor(values, device=self.target.device).T, strict=True):
            buffer.copy_(column)
        for slot, request in enumerate(requests):
            if (seen_tokens := request.draft_context().seen_tokens(self.slots.seen_tokens)) is not None:
                self.slots.seen_tokens[slot] = seen_tokens
        self.masks_eos = bool(self.target.eos) and any(request.params.min_new_tokens for request in requests)
        self.current = list(requests)

    @torch.inference_mode()
    def step(self, requests: Requests) -> None:
        """Decode one step of requests, which are in the order of their slots."""
        for group in self.groups(requests):
            self.step_of(requests, group)

    def step_of(self, requests: Requests, group: list[int]) -> None:
        """Decode one step of a group of requests in one pass."""
        drafted, result, out, accepted = self.run(requests, group)
        rows = result.tolist()  # the only place where the host waits for the device
        begin = time.perf_counter()
        width = accepted.path.shape[1]
        live = {}  # tokens and path of each sequence that goes on
        steps = {}
        for slot in group:
            request = requests[slot]
            # Two counts, then tokens, path and ranks of `width` each, then logit gaps.
            count, drafts, *rest = rows[slot]
            token, path, ranks, bits = (rest[i * width :][:count] for i in range(4))
            gaps = list(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits)))
            request.cache.keep(len(request.token_ids) - 1, [*range(count)])  # the indices after compaction
            committed = request.emit(token, ["draft"] * (count - 1) + ["bonus"], gaps)
            from_draft = min(count - 1, committed)
            rule = rules.NOTHING
            if drafts:
                has_q = not self.plan.has_q or self.plan.has_q[slot]
                is_greedy = request.params.sampling.temperature == 0 and not rules.is_lossy(request.params.rule)
                rule = rules.GREEDY_WALK if is_greedy else rules.label(self.rule(request.params, has_q=has_q))
            steps[slot] = Step(drafts, from_draft, committed, 0.0, 0.0, 0.0, rule, tuple(ranks[1 : from_draft + 1]))
            if not request.generation.finish_reason:
                live[slot] = token, path
        emitting = time.perf_counter() - begin
        self.timer.mark(None)  # the host's time since then is measured from `begin`
        if live and not self.fixed_shapes:
            self.commit(self.active(requests), out, accepted, width if self.compiles else max(row[0] for row in rows))
        for slot, (token, path) in live.items():
            self.draft_batch.update(slot, token, path, None if out.logits is None else out.logits[slot])
            if requests[slot].params.keep_passes:
                limit = requests[slot].max_draft_depth + len(token)
                target_pass = self.target_pass(slot, drafted, out, token, path, limit)
                requests[slot].generation.target_passes.append(target_pass)
        self.timer.mark("draft")
        seconds = self.timer.seconds()
        seconds["other"] += emitting  # the device is idle meanwhile
        draft, verified, other = (seconds[name] / len(group) for name in ("draft", "verify", "other"))
        for slot, step in steps.items():
            generation = requests[slot].generation
            generation.steps.append(step._replace(draft_s=draft, verify_s=verified, other_s=other))
            generation.decode_s += draft + verified + other

    def target_pass(
        self, slot: int, drafted: Drafted, out: TargetOutput, token: Tokens, path: list[int], limit: int
    ) -> Pass:
        """Return a sequence's part of the target's output, without padding and nodes deeper than `limit`."""
        tree = DraftTree(drafted.tree.token[slot], drafted.tree.parent[slot])
        nodes, index = trees.keep(tree, (tree.token >= 0) & (drafted.node_depth[slot] <= limit))
        row = slice(slot, slot + 1), path
        features = TargetOutput(out.hidden[row], out.last_hidden[row], None)
        old = index.tolist()
        following = torch.tensor(token, device=index.device)
        return Pass(following, features, nodes, [old.index(node) for node in path], out.last_hidden[slot, index])

    @torch.inference_mode()
    def dry_run(self, requests: Requests) -> tuple[Tokens, Drafted]:
        """Return the first token that a step would commit for each request, and the last group's drafts, uncommitted.

        The requests have equal sampling parameters.
        """
        self.load_slots(requests)
        tokens = []
        for request in requests:
            request.cache.snapshot()  # of recurrent states, which the pass of a lone root does not copy
        for group in self.groups(requests):
            drafted, result, *_ = self.run(requests, group, commits=False)
            rows = result.tolist()
            tokens += [rows[slot][2] for slot in group]
            for slot in group:
                requests[slot].cache.keep(len(requests[slot].token_ids) - 1, [])
        self.current = []
        return tokens, drafted

    def groups(self, requests: Requests) -> list[list[int]]:
        """Return the slots by pass: with equal sampling parameters, and on one side of longrope's switch."""
        if [*map(id, requests)] != [*map(id, self.current)]:
            self.load_slots(requests)
        switch = self.target.longrope
        groups = defaultdict[Any, list[int]](list)
        for slot, request in enumerate(requests):
            params = request.params
            side = switch is not None and request.cache.length >= switch.length
            groups[params.sampling, params.rule, params.logit_gaps, side].append(slot)
        return list(groups.values())

    def active(self, requests: Requests) -> Slots:
        """Return the slots of the current pass."""
        if self.fixed_shapes or len(requests) == len(self.slots.root):
            return self.slots
        return Slots(*(buffer[: len(requests)] for buffer in self.slots))

    def run(
        self, requests: Requests, group: list[int], *, commits: bool = True
    ) -> tuple[Drafted, HostRows, TargetOutput, Accepted]:
        """Run a step of a group; return the drafts, the host's tensor, the target's output and the accepted paths."""
        params, timer, switch = requests[group[0]].params, PhaseTimer(self.target.device), self.target.longrope
        timer.mark(None)
        for slot in group:
            if switch is not None and switch.recomputes(requests[slot].cache.length):
                cache = requests[slot].cache  # recompute its entries on the other side of the switch
                prefix = cache.length
                cache.keep(0, [])
                self.target.prefill(torch.tensor(requests[slot].token_ids, device=self.target.device), cache)
                cache.keep(prefix, [])
        mixed = len(group) < len(requests)
        contexts = [request.draft_context() if slot in group else None for slot, request in enumerate(requests)]
        if mixed or self.has_idle:
            self.slots.active[: len(requests)] = torch.tensor([int(context is not None) for context in contexts])
            self.has_idle = mixed
        if switch is not None:
            self.slots.max_draft_depth[: len(requests)] = torch.tensor(
                [0 if context is None else context.max_draft_depth for context in contexts]
            )
        longest = max(request.cache.length for request in requests)
        self.plan = self.draft_batch.begin(contexts, longest)
        check_size(self.target, self.plan.max_nodes, self.name)
        for has_q in {True, *self.plan.has_q}:
            self.rule(params, has_q=has_q)  # raises if the rule does not support the drafts
        slots = self.active(requests)
        if self.captures:
            self.graphs.keep(self.held_tensors())
        if self.compiles:
            self.compiled_stages.keep([*self.held_tensors(), *self.target.embeddings.kept_rows()])
        return self.run_stages(slots, self.kv_length(longest), params, timer, commits=commits)

    def held_tensors(self) -> list[Tensor]:
        """Return the buffers that stages read and write in place."""
        rows = self.draft_batch.traits.head_batch
        return [*self.slots, *self.cache.storage.blocks, *([] if rows is None else rows.tensors())]

    def run_stages(
        self, slots: Slots, kv_length: int, params: RequestParams, phase_timer: PhaseTimer, *, commits: bool = True
    ) -> tuple[Drafted, HostRows, TargetOutput, Accepted]:
        """Run a step's stages."""
        self.penalises = params.sampling.repetition_penalty != 1
        self.timer = phase_timer
        self.stage_key = self.graph_key(kv_length, params)
        drafted = self.launch(DeviceStep.draft, self.slots if self.compiles else slots, self.stage_key[0], params)
        if self.compiles:
            drafted = drafted.first(len(slots.root))
        phase_timer.mark("draft")
        out, result, accepted = self.launch(DeviceStep.verify, slots, drafted, kv_length, params)
        phase_timer.mark("verify" if self.captures else "other")
        if self.fixed_shapes and commits:
            self.commit(slots, out, accepted, accepted.path.shape[1])
        return drafted, result, out, accepted

    def kv_length(self, longest: int) -> int:
        """Return the number of entries that attention reads; without fixed shapes, the number before the tree."""
        if not self.fixed_shapes:
            return longest
        end = longest + self.plan.max_nodes
        capacity = self.cache.storage.capacity
        return end if end > capacity else min(round_up_kv_length(end), capacity)

    @property
    def allows_host_sync(self) -> bool:
        """Whether the host may read a stage's intermediate results, to skip work: on a GPU it would have to wait."""
        return not self.fixed_shapes and self.target.device.type == "cpu"

    @property
    def compiles(self) -> bool:
        """Whether the head's stages are compiled; their shapes are then fixed too, and include all slots."""
        return self.target.compiles_drafts and self.draft_batch.traits.on_device and self.plan.tree_depth > 0

    @property
    def captures(self) -> bool:
        """Whether the stages are captured in CUDA graphs, which need fixed shapes."""
        return self.fixed_shapes and self.graphs is not None

    def graph_key(self, kv_length: int, params: RequestParams) -> tuple[Any, ...]:
        """Return the key of the stages, head_kv_length first: equal keys mean equal shapes and branches."""
        # For few compiled shapes, the head reads the whole capacity.
        padded = self.compiles and not self.fixed_shapes
        head_kv_length = round_up_kv_length(self.cache.storage.capacity) if padded else kv_length
        gaps = params.logit_gaps
        return head_kv_length, params.sampling, params.rule, gaps, self.masks_eos, self.has_idle, self.plan.tree_id

    def launch(self, stage: Stage, *args: Any) -> Any:
        """Run a stage of a step under its key."""
        run = stage
        if self.compiles and stage in (DeviceStep.draft, DeviceStep.extend):
            run = partial(self.compiled_stages, (stage, *self.stage_key), compiled(stage, self.target.device.type))
        if self.captures:
            return self.graphs((stage, *self.stage_key), run, self, *args)
        return run(self, *args)

    def draft(self, slots: Slots, kv_length: int, params: RequestParams) -> Drafted:
        """Draft a tree for each sequence."""
        sampling, noise, samples = params.sampling, None, None
        if sampling.temperature > 0 and params.rule != rules.COUPLED:
            samples = rng.Samples(rng.hash_key(rng.hash_key(slots.rng_key, rng.DRAFT_KEY), slots.length + 1))
        elif sampling.temperature > 0 and self.plan.tree_depth:
            position = slots.length[:, None] + 1 + torch.arange(self.plan.tree_depth + 1, device=slots.root.device)
            vocab_size = self.target.embeddings.vocab_size
            noise = rng.exponential_noise(slots.rng_key[:, None].expand_as(position), position, vocab_size)
        seen = slots.seen_tokens[:, None] if self.penalises else None
        roots = DraftInputs(slots.root[:, None], sampling, seen, noise, samples)
        drafted = self.draft_batch.draft_trees(
            roots, slots.max_draft_depth, kv_length, allow_host_sync=not (self.fixed_shapes or self.compiles)
        )
        depth = drafted.ancestor_mask.sum(-1) - 1 if drafted.depth is None else drafted.depth
        return drafted._replace(depth=depth.expand_as(drafted.tree.token), noise=noise)

    def rule(self, params: RequestParams, *, has_q: bool = True) -> str:
        """Return the rule that verifies the drafts; `has_q` says whether their children may be sampled from q."""
        greedy = params.sampling.temperature == 0
        plan = self.plan
        if not plan.tree_depth:
            return "match"
        parents = None if greedy or params.rule == rules.COUPLED or not has_q else plan.sampled
        chain = plan.chain if parents is None else rules.is_chain(parents)
        return rules.resolve_rule(params.rule, chain, parents is not None, greedy)

    def verify(
        self, slots: Slots, drafted: Drafted, kv_length: int, params: RequestParams
    ) -> tuple[TargetOutput, HostRows, Accepted]:
        """Run the target over the trees and verify them: one stage, since the logits are too large to keep.

        The rules read the logits after the repetition penalty; EOS tokens are masked until min_new_tokens. Return the
        target's output, the tensor for the host, and the accepted paths.
        """
        out = self.forward(slots, drafted, kv_length)
        logits = self.target.embeddings.logits(out.last_hidden) if out.logits is None else out.logits
        out = out._replace(logits=logits if self.draft_batch.traits.reads_logits else None)
        seen_tokens = early = None
        if self.penalises:
            # Nodes off the path are replaced by the root, which is among the seen tokens.
            path = torch.where(drafted.ancestor_mask, drafted.tree.token[:, None], slots.root[:, None, None])
            seen_tokens = slots.seen_tokens[:, None].expand(-1, logits.shape[1], -1).scatter(2, path.clamp_min(0), True)
        if self.masks_eos:
            early = (drafted.node_depth < slots.min_tokens_left[:, None])[..., None] & self.target.eos_mask
        logits = process_logits(logits, params.sampling, seen_tokens, early)
        if not self.captures:  # no time can be measured inside a graph
            self.timer.mark("verify")
        tree, tree_depth, greedy = drafted.tree, self.plan.tree_depth, params.sampling.temperature == 0
        if not tree_depth:  # nothing to accept
            root = torch.zeros_like(slots.root[:, None])
            token = self.sample_target(slots, drafted, logits, params.sampling, root[:, 0], 0)[:, None]
            accepted = Accepted(root, slots.active, token)
            results = [slots.active[:, None], root, token, root, root]
        else:
            if greedy and self.allows_host_sync and len(tree.token) == 1 and not rules.is_lossy(params.rule):
                accepted, ranks, count = rules.follow_on_host(tree, argmax(logits), slots.max_draft_depth, tree_depth)
            else:
                valid = rules.valid_nodes(tree, drafted.ancestor_mask, drafted.node_depth, slots.max_draft_depth)
                if not self.draft_batch.traits.on_device:
                    valid &= tree.parent != LOOK_AHEAD
                accepted = self.run_rule(slots, drafted, valid, logits, params)
                accepted = accepted._replace(committed=accepted.committed * slots.active)
                ranks = rules.ranks(tree).gather(1, accepted.path)
                count = valid.sum(1) - 1
            results = [accepted.committed[:, None], count[:, None], accepted.token, accepted.path, ranks]
        if params.logit_gaps:
            results.append(top2_gap(logits.take_along_dim(accepted.path[..., None], 1)).view(torch.int32).long())
        return out, torch.cat(results, 1), accepted

    def forward(self, slots: Slots, drafted: Drafted, kv_length: int) -> TargetOutput:
        """Run the target over the trees; their entries follow each sequence's committed ones."""
        target, tree, ancestor_mask, depth = self.target, drafted.tree, drafted.ancestor_mask, drafted.node_depth
        count, size = tree.token.shape
        # Nodes beyond max_draft_depth run at its position and are never accepted; idle slots run at position 0.
        position = slots.length[:, None] + torch.minimum(depth, slots.max_draft_depth[:, None])
        position = position * slots.active[:, None]
        token = tree.token.clamp_min(0)
        layers = self.draft_batch.traits.feature_layers
        proposal = self.plan.proposal
        if count == 1 and not self.fixed_shapes and (target.compiled is None or proposal is not None):
            cache = self.cache.active[0]
            attn_mask = None
            if size > 1:
                cache.snapshot()  # a root is never rolled back, so the baseline needs no copy
                if target.takes_trees:
                    attn_mask = torch.cat([ancestor_mask.new_ones(1, size, kv_length), ancestor_mask], 2)
                elif not self.plan.chain:
                    raise ValueError(f"{target.name}: {target.incompatibility}; draft with tree=chain")
            stack = None if proposal is None or proposal.look_ahead is None else proposal.look_ahead.stack
            return target.run(token, position, attn_mask, cache, layers, stack=stack)
        end = kv_length if self.fixed_shapes else kv_length + size
        batch_pass, attn_mask, key_position = self.cache.storage.tree_pass(
            slots.length, ancestor_mask, depth, end, fixed_shapes=self.fixed_shapes
        )
        if self.allows_host_sync and target.takes_ragged and target.compiled is None:
            valid = (tree.token >= 0) * slots.active[:, None]
            layout = Ragged.of((valid * torch.arange(1, size + 1)).amax(1).clamp_min(1).tolist(), slots.length.tolist())
            if len(layout.groups) > 1:
                return target.run_ragged(layout, token, position, attn_mask, batch_pass, layers, key_position)
        return target.run(token, position, attn_mask, batch_pass, layers, key_position)

    def sample_target(
        self,
        slots: Slots,
        drafted: Drafted,
        logits: NodeProbs,
        sampling: Sampling,
        node: PerSequence,
        depth: int | PerSequence,
    ) -> PerSequence:
        """Return the target's tokens after nodes at a depth, sampled with the noise of the next positions."""
        logits = logits[torch.arange(len(node), device=node.device), node]
        if drafted.noise is None:
            return rng.sample_tokens(logits, sampling, slots.rng_key, slots.length + 1 + depth)
        return (distribution(logits, sampling) / drafted.noise[:, depth]).argmax(-1)

    def run_rule(
        self, slots: Slots, drafted: Drafted, valid: NodeMask, processed_logits: NodeProbs, params: RequestParams
    ) -> Accepted:
        """Run the verification rule; return the accepted paths."""
        tree, ancestor_mask, plan, sampling = drafted.tree, drafted.ancestor_mask, self.plan, params.sampling
        rule = rules.RULES[self.rule(params)]
        greedy = sampling.temperature == 0
        choose = partial(self.sample_target, slots, drafted, processed_logits, sampling)
        verify = None if greedy or drafted.q is None else rule.verify
        if rule.threshold is not None:  # at temperature 0 a lossy rule reads the probs at temperature 1
            p = distribution(processed_logits, replace(sampling, temperature=1.0) if greedy else sampling)
            last = rules.follow(tree, ancestor_mask, valid, rules.above_threshold(tree, p, rule.threshold))
            token = choose(last, drafted.node_depth.gather(1, last[:, None])[:, 0])
        elif greedy:
            best = argmax(processed_logits)
            last = rules.follow(tree, ancestor_mask, valid, tree.token == best.gather(1, tree.parent.clamp_min(0)))
            token = best.gather(1, last[:, None])[:, 0]
        elif verify is None or not all(plan.has_q):
            last, token = rules.walk(tree, valid, choose, plan.tree_depth, allow_host_sync=self.allows_host_sync)
        if verify is not None:  # children were sampled from q
            assert plan.sampled is not None
            assert drafted.q is not None
            p = distribution(processed_logits, sampling)
            key = rng.hash_key(rng.hash_key(slots.rng_key, rng.ACCEPT_KEY), slots.length + 1)
            uniforms = rng.uniform(key[:, None], torch.arange(p.shape[1], device=p.device))
            draft = rules.Sampled(plan.sampled, tree.token, valid, drafted.q)
            sampled_last, probs = verify(draft, p, uniforms, self.allows_host_sync)
            position = slots.length + 1 + drafted.node_depth.gather(1, sampled_last[:, None])[:, 0]
            noise = rng.exponential_noise(slots.rng_key, position, p.shape[-1])
            sampled_token = (probs / noise).argmax(-1)
            if all(plan.has_q):
                last, token = sampled_last, sampled_token
            else:
                sampled = torch.tensor(plan.has_q, device=p.device)
                last, token = torch.where(sampled, sampled_last, last), torch.where(sampled, sampled_token, token)
        return rules.accepted_paths(tree, ancestor_mask, last, token, plan.tree_depth)

    def commit(self, slots: Slots, out: TargetOutput, accepted: Accepted, max_committed: int) -> None:
        """Advance the slots by the accepted tokens, and append the accepted rows to the drafter.

        `max_committed` is an upper bound of the tokens that a sequence commits.
        """
        count = accepted.committed
        features = self.launch(DeviceStep.compact, slots, out, accepted, max_committed)
        self.timer.mark("other")
        if features is None:
            return
        if (idle := self.cache.storage.size - len(count)) and self.compiles:
            features = Features(*(pad(rows, (0, 0) * (rows.ndim - 1) + (0, idle)) for rows in features[:4]))
            count = pad(count, (0, idle))
        self.launch(DeviceStep.extend, features, count)
        self.timer.mark("draft")

    def compact(self, slots: Slots, out: TargetOutput, accepted: Accepted, max_committed: int) -> Features | None:
        """Compact the cache to the accepted paths and advance the slots; return the drafter's rows, if it reads any."""
        step = torch.arange(max_committed, device=accepted.path.device)
        path = accepted.path[:, :max_committed]
        token = accepted.token[:, :max_committed]
        row = torch.arange(len(path), device=step.device)[:, None]
        if not self.plan.chain:
            begin = slots.length[:, None]
            self.cache.storage.compact(row, begin + path, begin + step)
        root = token.gather(1, (accepted.committed[:, None] - 1).clamp_min(0))[:, 0]
        slots.root.copy_(torch.where(accepted.committed > 0, root, slots.root) if self.has_idle else root)
        slots.length.add_(accepted.committed)
        slots.max_draft_depth.sub_(accepted.committed)
        slots.min_tokens_left.sub_(accepted.committed)
        if self.penalises:
            taken = step < accepted.committed[:, None]
            slots.seen_tokens.scatter_(1, torch.where(taken, token, slots.root[:, None]), True)
        if self.draft_batch.traits.head_batch is None:
            return None
        return Features(token, out.hidden[row, path], out.last_hidden[row, path], torch.zeros_like(token))

    def extend(self, features: Features, count: PerSequence) -> None:
        """Append the accepted rows to the drafter."""
        self.draft_batch.traits.head_batch.commit(features, count)
