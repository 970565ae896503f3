"""What the doctor knows of a server that is not started: its flags, its model, the machine."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from csa2.capacity import ArenaPlan, plan_arena
from csa2.doctor.calibration import calibration_fault
from csa2.errors import OptionError
from csa2.formats import FormatLadder
from csa2.info import machine
from csa2.options import CacheOptions
from csa2.plan.fit import requests_that_fit, server_ladder
from csa2.plan.model_memory import ModelMemory, PlanError, read_model, weights_in

PREFLIGHT = "sglang_csa2.preflight"
"""Resolves flags as a start does; run in a process of its own, because this package knows no SGLang."""
PREFLIGHT_TIMEOUT_S = 600
ALIASES = {
    "model": "model_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
}
_PREFIX = "csa2_"
Preflight = Callable[[Sequence[str]], "Resolved"]


@dataclass(frozen=True)
class Resolved:
    """What a start would make of the flags: values by field, or its error, or why that is not known."""

    values: dict[str, Any] | None = None
    error: str | None = None
    unknown: str | None = None


@dataclass
class FlagCase:
    """All that is known before a start."""

    given: dict[str, Any]
    """Flags as they stand there, by field; True for a bare switch."""
    resolved: Resolved
    options: CacheOptions | None
    """None: they cannot be read."""
    model: ModelMemory | None
    weights_bytes: int
    memory_bytes: int
    """Of one device."""
    calibration_fault: str | None
    unseen: list[str] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """A field as a start resolves it, or as it is given."""
        return (self.given if self.resolved.values is None else self.resolved.values).get(name)

    def number(self, name: str) -> float | None:
        """The same as a number, or None where it is none."""
        try:
            return float(self.value(name))
        except (TypeError, ValueError):
            return None

    @property
    def ranks(self) -> int:
        """Ranks of tensor parallelism."""
        return int(self.number("tp_size") or 1)

    @property
    def context(self) -> int | None:
        """Tokens of the longest request."""
        asked = self.number("context_length")
        return int(asked) if asked else (self.model.max_context or None if self.model else None)

    @property
    def budget_bytes(self) -> int | None:
        """What SGLang would leave for a cache beside the weights, of one rank; None if the flags do not tell."""
        share = self.number("mem_fraction_static")
        return None if share is None else int(self.memory_bytes * share) - self.weights_bytes // self.ranks

    @property
    def arena_bytes(self) -> int | None:
        """Bytes of the arena of one rank, as far as known."""
        if self.options is None:
            return None
        return self.options.arena_bytes or self.budget_bytes

    def ladder(self) -> FormatLadder | None:
        """Formats at the smallest that the options allow; None without a model that is served."""
        if self.options is None or self.model is None or self.model.unserved:
            return None
        return server_ladder(self.model, self.ranks, self.smallest)

    @property
    def smallest(self) -> CacheOptions:
        """The options with the ratio at its end."""
        options = self.options or CacheOptions()
        return msgspec.structs.replace(options, ratio="8") if options.is_adaptive else options

    def plan(self) -> ArenaPlan | None:
        """How the arena would be cut.

        Raises:
            OptionError: it is too small for anything.
        """
        ladder, size = self.ladder(), self.arena_bytes
        return None if ladder is None or size is None else plan_arena(max(0, size), ladder.page_bytes, ladder.guard)

    def requests(self, context: int) -> int | None:
        """Requests of `context` tokens that fit at once, all as small as they get; None where that is not known.

        Raises:
            OptionError: the arena is too small for anything.
        """
        ladder, plan = self.ladder(), self.plan()
        return None if ladder is None or plan is None else requests_that_fit(plan, ladder, self.smallest, context)


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """Flags by field. What comes before the first flag, a command to start a server, is left out.

    Raises:
        OptionError: there is no flag.
    """
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = ALIASES.get(name.replace("-", "_"), name.replace("-", "_"))
            found[name] = value if equals else True
        elif name is not None:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    if not found:
        raise OptionError(
            "there are no flags after `--`: give those of a server, as in -- --model-path DIR --kv-compress csa2"
        )
    return found


def gather(words: Sequence[str], memory_bytes: int | None, preflight: Preflight | None = None) -> FlagCase:
    """Look at flags, model and machine.

    Raises:
        OptionError: there are no flags.
    """
    given = read_flags(words)
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    resolved = (preflight or run_preflight)(words[first:])
    case = FlagCase(given, resolved, None, None, 0, memory_bytes or int(machine()["memory_bytes"]), None)
    if resolved.unknown:
        case.unseen.append(f"what SGLang itself makes of the flags: {resolved.unknown}")
    _read_options(case)
    _read_model(case)
    return case


def run_preflight(flags: Sequence[str]) -> Resolved:
    """Ask `PREFLIGHT`, which takes some seconds."""
    command = [sys.executable, "-m", PREFLIGHT, *flags]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PREFLIGHT_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return Resolved(unknown=f"it did not answer within {PREFLIGHT_TIMEOUT_S} s")
    if ended.returncode == 0:
        values: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
        return Resolved(values)
    last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    if "No module named" in last:
        return Resolved(unknown=f"SGLang or its plugin is not installed here ({last})")
    # An exception's name comes before its words, and argparse's program before its error.
    head, colon, words = last.partition(": ")
    return Resolved(error=words if colon and " " not in head else last)


def _read_options(case: FlagCase) -> None:
    known = CacheOptions.__struct_fields__
    values = {name: case.value(_PREFIX + name) for name in known}
    try:
        options = msgspec.convert({k: v for k, v in values.items() if v is not None}, CacheOptions, strict=False)
        options.validate()
    except (msgspec.ValidationError, OptionError) as error:
        # A start says the same in better words, where one could be tried.
        if case.resolved.unknown:
            case.resolved = Resolved(error=str(error), unknown=case.resolved.unknown)
        return
    case.options = options


def _read_model(case: FlagCase) -> None:
    path = case.value("model_path")
    if path is None or path is True or not Path(path).exists():
        case.unseen.append(f"the model: --model-path {path} is no folder here")
        return
    try:
        case.model = read_model(Path(path))
    except PlanError as error:
        case.unseen.append(str(error))
        return
    case.weights_bytes = weights_in(Path(path)) or case.model.weights_bytes()
    calibration = case.options.calibration if case.options else None
    if calibration is not None and Path(path).is_dir():
        case.calibration_fault = calibration_fault(Path(calibration), Path(path))
