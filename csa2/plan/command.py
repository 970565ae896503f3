"""`csa2 plan`: arguments in, report out."""

import argparse
from typing import Any

import msgspec

from csa2.errors import OptionError
from csa2.plan.fit import CHUNK_TOKENS, Plan, Workload, make_plan
from csa2.plan.model_memory import PlanError, read_model, weights_in
from csa2.units import format_bytes, parse_bytes


def answer(arguments: argparse.Namespace) -> tuple[str, int]:
    """The plan as text or JSON, and the exit code: 0 if what is asked for fits, 1 if not.

    Raises:
        PlanError: a model that cannot be read, or no memory left for a cache.
        OptionError: a size or number out of range.
    """
    model = read_model(arguments.model)
    for name in ("context", "concurrency", "tp"):
        if getattr(arguments, name) < 1:
            raise OptionError(f"--{name} {getattr(arguments, name)} is out of range: give a number from 1")
    if model.max_context and arguments.context > model.max_context:
        raise PlanError(f"--context {arguments.context} is beyond the {model.max_context} tokens that the model takes")
    given = arguments.weights_bytes and parse_bytes(arguments.weights_bytes, "--weights-bytes")
    found = given or weights_in(arguments.model)
    workload = Workload(
        memory_bytes=parse_bytes(arguments.memory, "--memory"),
        context=arguments.context,
        concurrency=arguments.concurrency,
        ranks=arguments.tp,
        weights_bytes=found or model.weights_bytes(),
        reserve_bytes=arguments.reserve and parse_bytes(arguments.reserve, "--reserve"),
    )
    plan = make_plan(model, workload)
    source = "given" if given else "of its files" if found else "estimated from config.json; --weights-bytes says it"
    text = msgspec.json.format(msgspec.json.encode(as_record(plan)), indent=2).decode()
    return text if arguments.json else render(plan, source), 0 if plan.chosen else 1


def as_record(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; `formats` by name."""
    record: dict[str, Any] = msgspec.to_builtins(plan)
    record["formats"] = {fit.pop("name"): fit for fit in record["formats"]}
    return {**record, "recommended": flags(plan), "unserved": plan.model.unserved}


def flags(plan: Plan) -> str | None:
    """Options of a server for what was asked, or None where it does not fit."""
    if plan.chosen is None:
        return None
    work = plan.workload
    share = (plan.weights_bytes + plan.kv_bytes) / work.memory_bytes
    parts = [
        f"--context-length {work.context}",
        f"--max-running-requests {work.concurrency}",
        f"--chunked-prefill-size {CHUNK_TOKENS}",
        f"--mem-fraction-static {int(share * 100) / 100:.2f}",
    ]
    if work.ranks > 1:
        parts.append(f"--tp-size {work.ranks}")
    if plan.chosen.flags.startswith("--"):
        parts.append(plan.chosen.flags.removesuffix(" (SGLang alone)"))
    if "csa2" in plan.chosen.flags:
        parts.append(f"--csa2-arena-size {plan.kv_bytes}")
    return " ".join(parts)


def render(plan: Plan, source: str) -> str:
    """The plan as text.

    Args:
        source: where the size of the weights is from.
    """
    model, work = plan.model, plan.workload
    each = " a rank" if work.ranks > 1 else ""
    window = f", {model.window_layers} layers at most {model.window} tokens" if model.window_layers else ""
    lines = [
        f"A token takes {plan.bf16_bytes_per_token} bytes uncompressed: {model.formula}{window}.",
        f"A request of {work.context} tokens takes {_both(plan.request_bytes)}, {work.concurrency} of them "
        f"{_both(plan.request_bytes * work.concurrency)}.",
        "",
        f"memory{each:8} {_both(work.memory_bytes)}",
        f"weights        {_both(plan.weights_bytes)} ({source})",
        f"activations    {_both(plan.reserve_bytes)} ({'estimated' if work.reserve_bytes is None else 'given'})",
        f"cache          {_both(plan.kv_bytes)}",
        "",
        f"{'format':10} {'bytes/token':>11} {'tokens':>12} {'requests':>9}   flags",
    ]
    for fit in plan.formats:
        note = "   planned: refused still" if fit.planned else ""
        row = f"{fit.name:10} {fit.bytes_per_token:11.0f} {fit.tokens:12} {fit.requests:9}"
        lines.append(f"{row}   {fit.flags}{note}")
    lines.append("")
    if model.unserved:
        lines.append(f"--kv-compress csa2 does not serve this model yet: {model.unserved}.")
    if (recommended := flags(plan)) is not None and plan.chosen is not None:
        lines += [f"Least compressed that takes {work.concurrency} requests: {plan.chosen.name}.", recommended]
    else:
        lines.append(f"{work.concurrency} requests of {work.context} tokens do not fit in any format.")
    return "\n".join(lines)


def _both(num_bytes: int) -> str:
    """In binary and in decimal units, which are easily mixed up."""
    return f"{format_bytes(num_bytes)} ({num_bytes / 1e9:.3g} GB)"
