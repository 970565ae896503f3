"""What a forked scheduler is asked, and what it answers."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Request:
    """A prompt and the tokens that follow it, whatever the model would say."""

    rid: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """One run: a model, a cache, and groups of requests, each group served together after the one before."""

    model: str
    dtype: str
    groups: tuple[tuple[Request, ...], ...]
    csa2: dict[str, Any] | None = None
    """Options of the compressed cache, or None for SGLang's own cache and its torch attention."""
    replay: list[dict[str, list[str]]] | None = None
    """`Run.formats` of a compressed run: SGLang's own cache then holds what the codec makes of the same pages."""
    identity_layers: tuple[int, ...] | None = None
    """Instead of what the weights say. In a replay they must be given."""
    replay_rope: str = "rotated"
    """`--csa2-rope` of the run that is replayed."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Job":
        """The inverse of `dataclasses.asdict`, through JSON."""
        groups = tuple(
            tuple(Request(r["rid"], tuple(r["prompt"]), tuple(r["forced"])) for r in group) for group in data["groups"]
        )
        identity = data["identity_layers"]
        return cls(**{**data, "groups": groups, "identity_layers": None if identity is None else tuple(identity)})


@dataclass
class Run:
    """What a run gave."""

    logprobs: dict[str, Tensor] = field(default_factory=dict)
    """By request: (tokens, vocabulary) fp32, the distribution of every token after the prompt."""
    formats: list[dict[str, list[str]]] = field(default_factory=list)
    """After each forward pass, by running request: the format of each of its pages."""
    prefix_tokens: dict[str, int] = field(default_factory=dict)
    """By request: tokens of its prompt that were found in the radix tree."""
    batches: list[list[tuple[str, int]]] = field(default_factory=list)
    """Of each forward pass: requests with the tokens they computed."""
    stats: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    """What the plugin logged."""
