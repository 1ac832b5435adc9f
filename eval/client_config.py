"""How served endpoints are asked, as conf/eval.yaml has it, and what an evaluation of them may not ask for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.endpoint import check_url
from eval.row import LIVE
from eval.tuner_config import listed

if TYPE_CHECKING:
    from eval.config import EvalConfig

# What an endpoint decides itself, or cannot be asked for, and the value that asks for nothing.
NEUTRAL: dict[str, Any] = {
    "run": None, "compare": [], "tune": False, "budget": None, "request_rate": None, "truncate": False,
    "rule": "auto", "lossy": False, "dtype": "auto",
}  # fmt: skip


@dataclass(frozen=True)
class ClientConfig:
    """How a served endpoint is asked.

    Attributes:
        model: the name that it serves the target by; None takes the only one there is.
        chat: ask chats as chats; otherwise the user's words as a text to go on with, for a model without a template.
        timeout: seconds for one reply, to its last byte.
        patience: seconds that its metrics may lag behind its answers.
        api_key_env: the environment variable with the key; unset, none is sent.
        extra: further fields of every request.
    """

    model: str | None
    chat: bool
    timeout: float
    patience: float
    api_key_env: str
    extra: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse times that ask for nothing."""
        if self.timeout <= 0 or self.patience < 0:
            raise ValueError(
                f"client.timeout={self.timeout:g}, client.patience={self.patience:g}: the first must be positive, the "
                "second not negative"
            )


def check_endpoint(config: "EvalConfig") -> None:
    """Refuse what an endpoint cannot be asked for.

    Raises:
        ValueError: naming the key and the remedy.
    """
    if config.endpoint is None:
        if config.baseline is not None:
            raise ValueError(f"baseline is {config.baseline}, but there is no endpoint: give endpoint= as well")
        return
    for key in ("endpoint", "baseline"):
        if (url := getattr(config, key)) is not None:
            check_url(key, url)
    if config.baseline is not None and _place(config.baseline) == _place(config.endpoint):
        raise ValueError("baseline is the endpoint itself: serve the model without speculation at another port")
    given = [key for key, neutral in NEUTRAL.items() if getattr(config, key) != neutral]
    given += ["model"] * any(value is not None for value in config.model.values())
    given += [] if list(config.drafter) == ["head"] else ["drafter"]
    if given:
        raise ValueError(f"{', '.join(given)}: an endpoint is measured as it is served; leave that out")
    if LIVE not in listed(config.tier):
        raise ValueError(f"tier is {config.tier!r}: an endpoint is measured live alone")
    if config.baseline is not None and 0.0 not in config.temperatures():
        raise ValueError(
            f"temperature is {config.temperature!r}: texts can be compared at 0 alone, so give temperature=[0,…] or "
            "no baseline"
        )


def _place(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
