"""What a forecast prints: its table, the decision, and beside it what came out."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from eval.report.text import rich_table
from train.config import Budget, DeviceConfig
from train.forecast.curve import LEVEL, Array, interval
from train.forecast.pilots import Choice, Pilots


def ranged(samples: Array, unit: str = "") -> str:
    """Return the median with the interval."""
    middle, low, high = interval(samples)
    return f"{middle:.2f}{unit} [{low:.2f}, {high:.2f}]"


def table(pilots: Pilots, choices: Sequence[Choice]) -> Table:
    """Return what is forecast of every candidate, the fastest first."""
    header = ["head", "tokens", f"τ [{LEVEL:.0%}]", f"speedup [{LEVEL:.0%}]", "seconds"]
    body = [
        [
            choice.words, f"{choice.most * pilots.batch_tokens:,}", ranged(choice.tau),
            ranged(choice.speedup, "x"), f"{choice.most * pilots.state['cost'][choice.words]['seconds']:,.0f}",
        ]
        for choice in sorted(choices, key=lambda choice: -interval(choice.speedup)[0])
    ]  # fmt: skip
    return rich_table(f"what training to {pilots.budget} would bring", header, body)


def decision(pilots: Pilots, choice: Choice) -> str:
    """Return a line with the candidate that is trained, for how long and why no longer."""
    if not pilots.pays(choice):
        return (
            f"no candidate would be {pilots.config.least:g} times as fast as the target alone: the fastest, "
            f"{choice.words}, would reach {ranged(choice.speedup, 'x')}; the rest of the budget is not spent "
            "(forecast.least)"
        )
    tokens, most = choice.steps * pilots.batch_tokens, choice.most * pilots.batch_tokens
    trained = f"{choice.words} is trained on {tokens:,} tokens: τ {ranged(choice.tau)}, {ranged(choice.speedup, 'x')}"
    if choice.steps == choice.most:
        return f"{trained}; that is all of the budget"
    middle, low, high = (100 * (value - 1) for value in interval(choice.gain))
    return (
        f"{trained}; the rest of the budget, up to {most:,}, would bring {middle:.1f} % [{low:.1f}, {high:.1f}] more "
        f"and is not spent (forecast.worth={pilots.config.worth:g})"
    )


def outcome(choice: Choice, tau: float, speedup: float, prompts: int) -> str:
    """Return a line with the forecast beside what came out."""
    _, low, high = interval(choice.tau)
    where = "within" if low <= tau <= high else "outside"
    return (
        f"forecast: τ {ranged(choice.tau)}, {ranged(choice.speedup, 'x')}; came out: τ {tau:.2f}, {where} the "
        f"interval, and {speedup:.2f}x, on {prompts} prompts that the forecast had not seen"
    )


def plan(budget: Budget, share: float, operations: dict[str, float], device: DeviceConfig) -> Group:
    """Return what each candidate would cost by the operations of a token, and the assumed rate if there is one."""
    rate = None if device.tflops is None else device.tflops * 1e12 * device.mfu
    total = budget.amount if not budget.timed else None if rate is None else budget.amount * rate
    body = [
        [words, f"{flops:.3g}", *("-" if total is None else f"{share * total / flops:,.0f}" for share in shares)]
        for words, flops in operations.items()
        for shares in [(share / len(operations), 1 - share)]
    ]
    header = ["head", "operations a token", "tokens of its short trainings", "tokens of the run, if it is chosen"]
    costs = rich_table(f"what would be trained for {budget}, measurements left out", header, body)
    if rate is None:
        return Group(costs, f"hours are not known: device={device.name} has no peak; give device.tflops")
    takes = "" if budget.timed else f": {Budget(budget.amount / rate, True)} on one"
    return Group(costs, f"at an assumed {device.mfu:.0%} of {device.tflops:.3g} TFLOP/s ({device.name}){takes}")
