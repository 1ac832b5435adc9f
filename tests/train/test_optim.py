"""The schedule's shape, weight decay on matrices alone, the running average, and optimisers that go on bit for bit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import toys
from tests.train import jobs
from train import optim
from train.checkpoint import TrainState
from train.config import TrainerConfig
from train.loop import SCHEDULE, with_new_schedule
from train.optim import Ema, adamw, cooldown_begin, learning_rate, same_rates
from train.start import LoraAdapterConfig, adapt


@pytest.fixture(scope="module")
def config() -> TrainerConfig:
    return replace(jobs.configured([]).trainer, steps=100, warmup=0.1, lr=1.0, min_lr=0.1)


def test_warm_up_then_cosine(config: TrainerConfig) -> None:
    rates = [learning_rate(step, config) for step in range(100)]
    late = [learning_rate(step, replace(config, cooldown=0.396)) for step in range(100)]  # 40 steps
    assert (late[10:61], late[80]) == ([1.0] * 51, pytest.approx(rates[55]))
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[99] < 0.11
    short = replace(config, cooldown=0.2)
    assert cooldown_begin(short) == 80
    longer = replace(short, steps=200, warmup=0.05)
    assert [learning_rate(step, longer) for step in range(80)] == [learning_rate(step, short) for step in range(80)]
    schedule = {"steps": 100, "warmup": 0.1, "cooldown": 0.2}
    same = [
        same_rates(replace(longer, warmup=warmup), schedule, end) for warmup, end in ((0.05, 80), (0.05, 85), (0.1, 20))
    ]
    assert same == [True, False, False]


def test_a_run_that_is_lengthened_is_another_where_its_objective_moves_with_the_steps(config: TrainerConfig) -> None:
    longer = replace(config, steps=200, warmup=0.05, cooldown=0.2)
    now = {name: getattr(longer, key) for name, key in SCHEDULE.items()} | {"objective.base_loss_share": None}
    then = now | {"trainer.steps": 100, "trainer.warmup": 0.1}
    assert with_new_schedule(then, now, longer, 81) == now  # whose last step, 80, has the peak in both
    assert with_new_schedule(then, now, longer, 82) == then
    moving = {"objective.base_loss_share": [1, 0]}
    assert with_new_schedule(then | moving, now | moving, longer, 80) == then | moving


def test_decay_on_matrices_alone(config: TrainerConfig) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    groups = adamw([*module.parameters()], replace(config, weight_decay=0.5)).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.5, 1), (0.0, 3)]


def test_each_optimiser_has_the_numbers_of_the_configuration(config: TrainerConfig) -> None:
    given = replace(config, optimizer="muon", lr=0.5, betas=(0.1, 0.2), momentum=0.3, weight_decay=0.4)
    muon, matrices, vectors = optim.optimizer(toys.head("eagle3", toys.target()).requires_grad_(), given).param_groups
    assert (muon["lr"], muon["momentum"], muon["weight_decay"], muon["nesterov"]) == (0.5, 0.3, 0.4, True)
    for group, decay in ((matrices, 0.4), (vectors, 0.0)):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.1, 0.2), decay)


def test_average_follows_the_weights() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, 0.0)
    average, off = Ema(module, 0.9), Ema(module, 0.0)
    torch.nn.init.constant_(module.weight, 1.0)
    average.update(module)
    off.update(module)
    assert TrainState(module, None, average).weights()["weight"].item() == pytest.approx(0.1)
    assert TrainState(module, None, off).weights()["weight"].item() == 1.0


def test_matrices_and_vectors_are_updated_by_one_kernel_on_a_gpu_alone(
    config: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [*torch.nn.Linear(3, 4).parameters()]
    assert not adamw(parameters, config).defaults["fused"]
    monkeypatch.setattr(optim, "FUSED", ("cpu",))
    assert adamw(parameters, config).defaults["fused"]


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_steps_are_counted_on_after_a_resumption_where_the_optimiser_counts_them(fused: bool, device: str) -> None:
    """A fused optimiser does beside its parameters, which here lie on a device without values."""
    module = torch.nn.Linear(2, 3, device="meta")
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.defaults["fused"] = fused
    state = TrainState(module, optimizer, Ema(module, 0.0))
    state.write("state/weight/step", torch.tensor(4.0))
    state.write("state/weight/exp_avg", torch.zeros(3, 2))
    kept = optimizer.state[module.weight]
    assert kept["step"].device.type == device
    assert kept["exp_avg"].device.type == "meta"


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.0), (torch.float32, 0.02)])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_is_torchs_in_the_fast_dtype(
    dtype: torch.dtype, error: float, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "fast_dtype", lambda _: dtype)
    start, *gradients = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    (ours, theirs), options = (start.clone().requires_grad_() for _ in range(2)), {"lr": 0.1, "momentum": 0.8}
    both = [optim.Muon([ours], **options), torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options)]
    for gradient in gradients:
        for weight, optimizer in zip((ours, theirs), both, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    assert (ours - theirs).norm() <= error * (theirs - start).norm()
    update = optim.orthogonal(gradients[0].to(dtype), both[0].param_groups[0]["ns_coefficients"])
    assert update.dtype == dtype
    assert 0.5 < torch.linalg.svdvals(update.float()).min() < torch.linalg.svdvals(update.float()).max() < 1.3


def hidden(head: Any) -> list[str]:
    """Return the names of the matrices that Muon moves."""
    ids = set(map(id, optim.hidden_matrices(head)))
    return [name for name, p in head.named_parameters() if id(p) in ids]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", [*toys.HEAD_CONFIGS, *toys.OPTIONS])
def test_muon_moves_the_matrices_whose_rows_are_no_tokens(name: str, adapted: bool) -> None:
    """By their sizes, where those of a vocabulary are no hidden state's."""
    head: Any = toys.head(name, toys.target()).requires_grad_()
    sizes = [toys.VOCAB] if head.vocab is None else [toys.VOCAB, len(head.vocab.ids)]
    assert not {toys.SIZES["hidden_size"], toys.SIZES["intermediate_size"]} & {*sizes}
    if adapted:
        adapt(head, LoraAdapterConfig("lora", 2, 2, 0.0, False, None))
    matrices = [name for name, p in head.named_parameters() if p.requires_grad and p.ndim == 2]
    assert hidden(head) == [name for name in matrices if len(head.get_parameter(name)) not in sizes]


@pytest.mark.parametrize("way", ["foreach", "fused", "muon"])
def test_an_optimiser_goes_on_bit_for_bit(way: str, config: TrainerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped(module: torch.nn.Module, optimizer: Any, first: int) -> None:
        for number in range(first, first + 3):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
            module(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made(seed: int) -> tuple[Any, Any, TrainState]:
        torch.manual_seed(seed)
        module: Any = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 3))
        module.embeddings, module.vocab = SimpleNamespace(vocab_size=3), None
        optimizer: Any = making(module)
        return module, optimizer, TrainState(module, optimizer, Ema(module, 0.0))

    def making(module: Any) -> Any:
        if way == "foreach":
            return torch.optim.AdamW(module.parameters(), 0.01, foreach=True)
        return optim.optimizer(module, replace(config, lr=0.01, optimizer="muon" if way == "muon" else "adamw"))

    monkeypatch.setattr(optim, "FUSED", () if way == "foreach" else ("cpu",))
    one, optimizer, state = made(0)
    stepped(one, optimizer, 0)
    kept = {name: state.read(name) for name in state.names()}
    stepped(one, optimizer, 3)
    other, resumed, copy = made(1)
    for name, value in kept.items():
        copy.write(name, value)
    stepped(other, resumed, 3)
    assert all(copy.read(name).equal(state.read(name)) for name in state.names())
    assert not one[0].weight.equal(kept["weight/0.weight"])
