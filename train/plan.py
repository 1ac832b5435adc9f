"""The plan of a run: its memory, disk, operations and hours in closed form, from configurations.

A device holds the process's own memory, the target, the head with its optimiser, and the widest stage of a step: the
target's pass or the head's step. The final evaluation comes after all of these are freed. All tokens count as trained.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from data.features.store import size
from heads import HEADS
from heads.base import HeadModule, Layers, draft_size, frozen_count, layer_dims_of, parameter_count
from heads.common.target_config import UNFIT, experts_of, read_target_config, reason
from heads.medusa import Medusa
from heads.modules.autoregressive import Autoregressive
from heads.modules.layers import Attention, Recomputing, SwiGLU
from heads.modules.vocab import AccumulatingModule, freeze_around_candidates
from inference.target.attention import packing
from inference.target.cache import recurrence
from inference.target.config import DTYPES, ModelConfig, fast_dtype
from inference.target.embeddings import TargetEmbeddings
from inference.target.loading import saved_quantization
from inference.target.placement import AUTO, DEVICE_MAP, FSDP, GB, OFFLOAD, TENSOR_PARALLEL
from train.config import LauncherConfig, RunConfig, TrainerConfig
from train.distributed.strategy import BUCKET
from train.losses import NOT_OF_LOGITS, READ_P
from train.objective import TEACHER_ROWS, chunk_rows
from train.optim import hidden_matrices
from train.start import adapt

GIB = 2**30
ESTIMATE_ERROR = 0.15  # relative error of a plan, from the measurements of docs/training_plan.md
MAX_UTILISATION = 1 - ESTIMATE_ERROR  # share of a device's memory that a plan's choices may use
PREFETCH_LAYERS = 2  # layers of a gathered or offloaded target that are on a device at once
ROW_BYTES = 9  # bytes of a packed token: id, document and mask
HOST_BASE = 1.5  # GiB of host memory per process with torch's CUDA libraries
# Bytes per weight, scales included: by `model.quantize`, and by a checkpoint's quant_method if it states no bits.
QUANTIZED = {"int8": 1.0, "torchao_int8": 1.0, "bnb_int8": 1.0, "bnb_nf4": 0.56}
BY_METHOD = {"fp8": 1.0, "fbgemm_fp8": 1.0, "eetq": 1.0, "mxfp4": 0.53}
BITS = r'(?:"(?:bits|w_bit|num_bits)": |"load_in_(?=\dbit": true))(\d+)'  # a weight's, in a checkpoint's quantisation
SCALES = 0.06  # bytes a weight of less than 8 bits takes in the scales of its group
# Models of Llama's layers, by how many norms as wide as an attention head each layer has.
PLAIN = {"llama": 0, "qwen3": 2, "qwen3_moe": 2}
ONCE = ("fusion", "hidden_norm", "inject_norm", "prefix")  # modules of a head that read the target's rows, once
# Bytes of each value in a chunk: draft's logit, a further loss's, candidates' score, target's logit, its probability.
LOGIT, LOSS, SCORE, TEACHER, PROB = 12, 12, 20, 10, 4
HALF_BLOCK = 64  # keys: attention works in blocks of 128 queries, in which half of the pairs are masked
Sizes = dict[str, int]  # bytes by what they hold


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target; parameters are numbers, not bytes."""

    config: PreTrainedConfig
    target: TargetEmbeddings  # on the meta device
    feed: int  # inner width of the MLP, summed over the experts that a token passes through
    embeddings: int  # number of parameters of embedding and lm_head, counted once if they are tied
    inner: int  # number of all other parameters, in layers and norms
    active: int  # number of the `inner` parameters that a token passes through
    packs: bool  # whether attention runs per document, without a mask of quadratic size
    loads_alone: bool  # whether embedding and lm_head load without the layers, as plain weights

    def working(self, tokens: int, length: int, item: int, features: int, group: int = 1) -> int:
        """Return a pass's temporary bytes, with `item` bytes per value and a `group` of devices that share a layer."""
        dims, width = self.target.layer_dims, self.target.hidden_size
        queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        attention, feed = 2 * width + (6 * queries + 3 * keys) // group, 2 * width + 3 * self.feed // group
        mask = 0 if self.packs else tokens * length * (3 + item)
        return tokens * item * (max(attention, feed, width * (2 + 8 // item)) + features * width) + mask

    def weight_bytes(self, quantize: str | None, item: float, device: str) -> float:
        """Return the bytes of a loaded weight of the layers, or `item` if transformers dequantises."""
        saved = saved_quantization(self.config) or {}
        method, written = saved.get("quant_method"), json.dumps(saved, default=str)
        if (method == "fp8" and device == "cpu") or (method == "mxfp4" and not find_spec("kernels")):
            return item
        bits = max((bits for bits in map(int, re.findall(BITS, written)) if 0 < bits <= 16), default=None)
        default = BY_METHOD.get(str(method)) or QUANTIZED.get(quantize or "", item)
        return default if bits is None else bits / 8 + (SCALES if bits < 8 else 0)


def target_shape(model: ModelConfig) -> TargetShape:
    """Return a target's shape, its parameters counted on the meta device; refuse a configuration without a model."""
    return _target_shape(model.path, model.trust_remote_code, json.dumps(model.shape or {}))


@cache  # the search for a placement calls it many times
def _target_shape(path: str, trust_remote_code: bool, given: str) -> TargetShape:
    shape = json.loads(given)
    try:
        config = read_target_config(path, trust_remote_code, cached_alone=True)
    except ValueError:
        try:
            if is_given := shape.pop("of", None) == path:
                if shape.get("model_type") in PLAIN:
                    return plain_shape(PreTrainedConfig(**shape), PLAIN[shape["model_type"]])
                config = transformers.AutoConfig.for_model(**shape)
            else:
                config = read_target_config(path, trust_remote_code)
        except UNFIT as error:
            where = f"model.shape of {path}" if is_given else f"model.path={path}"
            raise ValueError(
                f"{where}: its configuration cannot be read ({reason(error)}); give a folder that holds its "
                "config.json, or its values as model.shape, with of: the path"
            ) from error
    try:
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        built.tie_weights()
    except UNFIT as error:
        raise ValueError(f"model.path={path}: no model can be made of its config.json ({reason(error)})") from error
    text = config.get_text_config()
    ends = built.get_input_embeddings(), built.get_output_embeddings()
    embeddings = {id(module.weight): module.weight.numel() for module in ends}
    inner = {name: p.numel() for name, p in built.named_parameters() if id(p) not in embeddings}
    experts = sum(count for name, count in inner.items() if ".experts." in name)
    available, chosen = experts_of(text) or (1, 0)
    target = TargetEmbeddings(built)
    whole, expert = target.layer_dims.intermediate_size, getattr(text, "moe_intermediate_size", None)
    return TargetShape(
        config, target, chosen * (expert or whole) if experts else whole, sum(embeddings.values()),
        sum(inner.values()), sum(inner.values()) - experts + experts * chosen // available,
        recurrence(text, nn.ModuleList()) is not None or packing(built) is not None,
        not any(list(module.buffers()) for module in ends),
    )  # fmt: skip


def plain_shape(config: Any, norms: int) -> TargetShape:
    """Return the shape of a model of PLAIN by its numbers alone: to import its class takes half as long as a plan."""
    width, layers, dims = config.hidden_size, config.num_hidden_layers, layer_dims_of(config)
    with torch.device("meta"):  # nn.Embedding would draw its values there, for which torch imports its compiler
        embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, width))
        lm_head = nn.Linear(width, config.vocab_size, bias=False)
    ends = {"get_input_embeddings": lambda: embedding, "get_output_embeddings": lambda: lm_head}
    model: Any = SimpleNamespace(config=config, **ends)
    available, chosen = experts_of(config) or (1, 1)
    feed = config.moe_intermediate_size if available > 1 else dims.intermediate_size
    attention = 2 * width * dims.head_dim * (dims.num_heads + dims.num_kv_heads) + norms * dims.head_dim
    layer = attention + 2 * width + available * width * (available > 1)  # without the MLPs, with their router
    inner, active = (width + layers * (layer + 3 * width * feed * count) for count in (available, chosen))
    tables = embedding.weight.numel() * (1 if config.tie_word_embeddings else 2)
    return TargetShape(config, TargetEmbeddings(model), chosen * feed, tables, inner, active, True, True)


class HeadCost(NamedTuple):
    """The parameters of a head, and a micro-batch's bytes and FLOPs of both passes."""

    whole: int  # parameters without adapters
    trained: int
    frozen: int
    moments: int  # optimiser state: one value per weight of Muon's matrices, two per other weight
    feature_layers: Layers  # target layers that the head reads
    activations: int  # bytes kept for the backward pass, with the weights in bf16 and the drafts
    loss: int  # bytes of the drafts' gradients, a chunk of logits, and the gradients of lm_heads
    flops: int


def head_cost(run: RunConfig, target: TargetEmbeddings, micro_batch_size: int, device: str, item: int) -> HeadCost:
    """Return a micro-batch's cost on a type of device; refuse a head that does not fit the target or the depths."""
    with torch.device("meta"):
        head = HEADS[run.head.name](run.head, target)
        whole = parameter_count(head)
        adapt(head, run.peft)
        freeze_around_candidates(head)
    learns = getattr(run.head, "candidates", None) is None  # otherwise gradients reach two factors alone
    depths, anchors, length = run.objective.depths, run.objective.anchors, run.data.length
    if isinstance(head, HeadModule) and (head.max_depth < depths or not isinstance(head, Autoregressive)):
        head.check_depths(depths)
    tokens = micro_batch_size * length
    drafted = micro_batch_size * min(length, anchors or length)  # rows drafted from at each depth
    # Activations: rows times the bytes that the modules keep per row. A query attends to half of the window's keys.
    window = min(length, getattr(run.head, "length", None) or length)
    keys = min(length, window - window * window / (2 * length) + HALF_BLOCK)
    saved = flops = 0.0
    for module, rows in computed(head, tokens, drafted, depths):
        saved += rows * per_row(module, item, (experts_of(target.config) or (1, 1))[1], run.trainer.recompute)
        for inner in module.modules():
            if isinstance(inner, nn.Linear | AccumulatingModule) and inner.weight is not None:
                passes = (8 if run.trainer.recompute else 6) if learns or inner.weight.requires_grad else 2
                flops += passes * rows * inner.weight.numel()
            elif isinstance(inner, Attention):
                flops += (14 if learns else 4) * keys * rows * inner.q_proj.out_features
    # A masked position reads copies of its block's keys and values: one per position, on CUDA one per block.
    slots = getattr(head, "size", depths - 1 if hasattr(head, "mask_hidden") else 0)
    copies = drafted * slots * (1 if device == "cuda" else slots)
    saved += copies * sum(2 * item * m.k_proj.out_features for m in head.modules() if isinstance(m, Attention))
    # The states of all drafts, in fp32 as norms return them; Medusa's last blocks keep them anyway.
    size, width = draft_size(head), target.hidden_size
    drafts = depths * tokens * width * (4 if any(hasattr(head, name) for name in ("norm", "ln")) else item)
    saved = (saved if learns else 0) + (0 if isinstance(head, Medusa) else drafts)
    teachers = min(tokens, depths * drafted)
    chunk = min(teachers, chunk_rows(head, device, depths * tokens))
    taught = TEACHER * target.vocab_size * (chunk if head.vocab is None else min(chunk, TEACHER_ROWS))
    logit = LOGIT + LOSS * len({*run.objective.losses} - READ_P - NOT_OF_LOGITS) + SCORE * (not learns)
    loss = drafts + PROB * size * chunk + max(taught, logit * size * chunk * drafted // teachers)
    parameters, count = parameter_count(head) + frozen_count(head), parameter_count(head)
    lm_heads = [module.weight for module in head.modules() if isinstance(module, AccumulatingModule)]
    owned = sum(weight.numel() for weight in lm_heads if weight is not None and weight.requires_grad)
    saved, loss = saved + (2 * parameters if item == 2 else 0), loss + 4 * owned
    forward = (2 if learns else 1) / 3  # and the gradient of its input, where there is one
    shared = forward * width * size if any(weight is None for weight in lm_heads) else 0
    flops += 6 * drafted * depths * shared + 2 * teachers * width * target.vocab_size
    moments = 2 * count - (run.trainer.optimizer == "muon") * sum(p.numel() for p in hidden_matrices(head))
    return HeadCost(whole, count, parameters - count, moments, head.feature_layers, round(saved), loss, round(flops))


def computed(head: Any, tokens: int, drafted: int, depths: int) -> list[tuple[Any, float]]:
    """Return a head's modules except lm_heads, each with the number of rows that it computes over all depths."""
    modules: list[tuple[Any, float]] = []
    size = getattr(head, "size", 0)  # of a block, whose keys and values are the context's too
    whole = drafted * size if size else tokens + (depths - 1) * drafted
    for name, module in head.named_children():
        if name in ONCE or size or isinstance(head, Autoregressive):
            modules.append((module, tokens if name in ONCE else whole))
        elif isinstance(module, nn.ModuleList):  # one module per depth, or a few that the depths share
            modules.append((module, drafted * depths / len(module)))
    attentions = [layer.self_attn for layer in (head.layers if size else ())]
    return modules + [(linear, tokens) for a in attentions for linear in (a.k_proj, a.v_proj)]


def per_row(module: Any, item: int, chosen: int, recompute: bool) -> float:
    """Return the bytes that a module keeps for a row, which passes through `chosen` experts: docs/training_plan.md."""
    if isinstance(module, AccumulatingModule):  # an lm_head, whose rows are scored in chunks
        return 0
    if isinstance(module, nn.Linear):
        return item * (module.in_features + module.out_features)
    if isinstance(module, SwiGLU) and recompute:
        return 4 * module.gate_proj.in_features
    saved = sum(per_row(child, item, chosen, recompute) for child in module.children())
    saved *= getattr(module, "repeat", 1)  # times that a tied block runs
    norm = item if recompute and isinstance(module, Recomputing) else 4 + item
    if isinstance(getattr(module, "down_proj", None), nn.Linear):
        saved += item * module.down_proj.in_features
    if isinstance(getattr(module, "q_proj", None), nn.Linear):
        queries = module.q_proj.out_features
        saved += item * (queries - 2 * module.q_proj.in_features * recompute)  # queries, keys and values share that
        normed = any(True for _ in getattr(module, "q_norm", nn.Identity()).parameters())
        saved += (norm + item) * (queries + module.k_proj.out_features) if normed else 0
    direct = [*module.parameters(recurse=False)]  # of norms, and of experts
    saved += sum(norm * p.numel() for p in direct if p.ndim == 1)
    return saved + sum(chosen * item * sum(p.shape[1:]) for p in direct if p.ndim == 3)


class Memory(NamedTuple):
    """The memory of the fullest device, or of a node's host, in bytes."""

    process: int  # the process's memory before anything is loaded
    resident: Sizes
    stages: Sizes
    evaluation: int  # the final evaluation, which replaces all others but the process
    slack: float  # share of the widest stage that the allocator holds beyond the requests
    capacity: int | None  # None if unknown

    @property
    def peak(self) -> int:
        """Return the bytes at the peak."""
        widest = max(self.stages.values(), default=0)
        return self.process + max(sum(self.resident.values()) + round((1 + self.slack) * widest), self.evaluation)

    @property
    def utilization(self) -> float:
        """Return the used share of the capacity, 0 if the capacity is unknown."""
        return self.peak / self.capacity if self.capacity else 0.0


class Plan(NamedTuple):
    """The plan of a run: the shapes of target and head, and their memory."""

    run: RunConfig
    shape: TargetShape
    cost: HeadCost
    micro_batch_size: int  # packed sequences per forward pass
    memory: Memory  # memory of the first process's device, which also measures and evaluates
    host: Memory | None  # memory of a node's host; None on a CPU, where the host is the device
    disk: Sizes  # bytes of checkpoints, of the saved head, and of a feature store with all tokens
    flops: tuple[float, float]  # FLOPs of the whole run without measurements: the target's and the head's
    hours: float | None  # hours of training; None if the device's peak is unknown
    target_hours: float | None  # hours of the target's passes on one device

    @property
    def utilization(self) -> float:
        """Return the used share of the device's memory, or of the host's if that is larger."""
        return max(memory.utilization for memory in (self.memory, self.host) if memory is not None)


def plan(run: RunConfig) -> Plan:
    """Return the plan of a run, loading and writing nothing; `trainer.micro_tokens` of null is the most that fit."""
    given, world = run.trainer.micro_tokens, run.launcher.world
    if given is not None:
        return _plan(run, min(-(-run.sequences_per_step // world), given // run.data.length))
    # The largest power of two that fits MAX_UTILISATION of the device, or the peak of one sequence if that is higher.
    micro_batch_size, least = 1 << max(0, (run.sequences_per_step // world).bit_length() - 1), _plan(run, 1)
    limit = max(least.memory.peak, MAX_UTILISATION * (least.memory.capacity or 0))
    while (planned := _plan(run, micro_batch_size)).memory.peak > limit:
        micro_batch_size //= 2
    return planned


def _plan(run: RunConfig, micro_batch_size: int) -> Plan:
    trainer, launcher, features, model, length = run.trainer, run.launcher, run.features, run.model, run.data.length
    device, shape, kind = run.device, target_shape(model), str(run.device.type)
    fast = fast_dtype(torch.device(kind))
    item = (fast if model.dtype == AUTO else DTYPES[model.dtype]).itemsize  # bytes per value of the target
    value = 2 if trainer.precision == "bf16" or (trainer.precision == AUTO and fast == torch.bfloat16) else 4
    cost = head_cost(run, shape.target, micro_batch_size, kind, value)
    # A quantised checkpoint's embeddings do not load without its layers, nor embeddings that compute with buffers.
    loaded = run.reads_target or saved_quantization(shape.config) is not None or not shape.loads_alone
    layers = round(shape.weight_bytes(model.quantize, item, kind) * shape.inner) if loaded else 0
    target, gathered, offloaded = target_state(run, shape, layers, item)
    evaluation, host_evaluation = 0, 0
    if run.eval.prompts:
        gate = item if run.eval.gate_dtype == AUTO else DTYPES[run.eval.gate_dtype].itemsize
        whole = round(shape.weight_bytes(model.quantize, gate, kind) * shape.inner)
        evaluated, again, host_evaluation = target_state(run, shape, whole, gate)
        evaluation = sum(evaluated.values()) + again
    # A step's first micro-batch comes before the gradient; later ones keep the features of the one before in the pass.
    tokens, read = micro_batch_size * length, len(cost.feature_layers)
    row, copied = shape.target.hidden_size * (read + 1), value if run.objective.noise > 0 or value != item else 0
    state, first = head_state(launcher, trainer, cost), micro_batch_size * launcher.world >= run.sequences_per_step
    step = cost.activations + cost.loss - first * state.get("head: gradients", 0)
    stages = {"head's step": tokens * row * (item + copied) + max(0, step)}
    group = (model.tensor_parallel or launcher.local) if model.placement == TENSOR_PARALLEL else 1
    if layers and features.mode == "live":
        working = shape.working(tokens, length, item, read, group)
        stages["target's pass"] = gathered + working + (1 + (group > 1) + (not first)) * tokens * row * item
    capacity = round(float(device.memory_gb or 0) * GIB)
    memory = Memory(
        round(device.context_gb * GIB), target | state, stages, evaluation, device.slack,
        capacity // launcher.local if kind == "cpu" else capacity,
    )  # fmt: skip
    checkpoint = 4 * (cost.trained * (1 + (trainer.ema > 0)) + cost.frozen + cost.moments)
    data = trainer.steps * trainer.batch_tokens
    held = {"data": ROW_BYTES * data, "a checkpoint that is being written": checkpoint // launcher.world}
    host = None
    if kind == "cpu":
        memory = memory._replace(resident=memory.resident | held)
    else:
        held = {name: launcher.local * size for name, size in (held | {"target: layers": offloaded}).items() if size}
        room = None if device.host_gb is None else round(device.host_gb * GIB)
        host = Memory(round(launcher.local * HOST_BASE * GIB), held, {}, host_evaluation, 0, room)
    # one more for the best checkpoint, and one for the checkpoint being written
    disk = {"checkpoints": (trainer.keep + (2 if trainer.eval_prompts else 1)) * checkpoint, "head": 4 * cost.whole}
    if features.mode == "stored":
        disk["features"] = data * (read + 1) * size(shape.target.hidden_size, features.dtype)
    dims = shape.target.layer_dims
    attention = 4 * length * dims.num_heads * dims.head_dim * shape.target.num_layers
    flops = data * (2.0 * shape.active + attention), data / tokens * cost.flops
    hours = target_hours = None
    if device.tflops is not None:  # on a CPU the rate is that of all cores, which the machine's processes share
        rate, devices = 3600e12 * device.tflops * device.mfu, launcher.num_nodes if kind == "cpu" else launcher.world
        target_hours = flops[0] / rate
        hours = (flops[1] / rate + (features.mode == "live") * target_hours) / devices
    return Plan(run, shape, cost, micro_batch_size, memory, host, disk, flops, hours, target_hours)


def target_state(run: RunConfig, shape: TargetShape, layers: int, item: int) -> tuple[Sizes, int, int]:
    """Return the target's bytes, by those of all layers: on the first device, gathered there in a pass, on the host."""
    placed, launcher = run.model.placed, run.launcher
    prefetched, gathered, host, parts, there = PREFETCH_LAYERS * layers // shape.target.num_layers, 0, 0, 1, layers
    if placed.kind == TENSOR_PARALLEL:
        parts = run.model.tensor_parallel or launcher.local
    elif placed.kind == FSDP:
        parts, gathered = launcher.world, prefetched
    elif placed.kind == DEVICE_MAP:
        mine = (placed.devices or range(run.device.count or launcher.local))[:: launcher.local]
        there = layers // len(mine) if 0 in mine else 0  # the devices of a process share its layers evenly
    elif placed.kind == OFFLOAD:
        stay = min(layers, int((placed.memory_gb or 0) * GB))
        there, host = min(layers, stay + prefetched), 0 if placed.offload == "disk" else layers - stay
    ends = item * shape.embeddings
    shard = ends // parts if layers and parts > 1 else 0  # transformers' own of them, which trainers do not read
    return {"target: embedding, lm_head": ends + shard, "target: layers": there // parts}, gathered, host


def head_state(launcher: LauncherConfig, trainer: TrainerConfig, cost: HeadCost) -> Sizes:
    """Return the bytes of a process for the head and its optimiser between steps, all in fp32."""
    strategy, world, whole = launcher.strategy, launcher.world, 4 * cost.trained
    zero, sharded = strategy.startswith("zero"), strategy in ("zero3", "fsdp2") and world > 1
    weights, shards = world if sharded else 1, 1 if strategy == "ddp" else world  # shards of gradients and moments too
    buckets = 8 * min(BUCKET, cost.trained) if zero else whole if strategy == "ddp" and world > 1 else 0
    sizes = {
        "head: weights": 4 * cost.frozen + whole / weights + (whole / world if zero else 0),  # DeepSpeed's own copy
        "head: gradients": whole / shards,
        "head: buckets of gradients": buckets,
        "head: optimiser": 4 * cost.moments / shards,
        "head: gathered": 2 * whole * sharded,  # weights during a pass, and gradients before they are scattered
        "head: EMA": whole / weights * (trainer.ema > 0),
    }
    return {name: round(size) for name, size in sizes.items() if size}
