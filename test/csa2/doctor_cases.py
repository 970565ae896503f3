"""Cases for the doctor: a healthy server, and what a test changes of it."""

from csa2.doctor.metrics import Metrics
from csa2.doctor.readings import Case, Load, Reading

FORMATS = {"bf16": 1000, "fp8": 516, "fp4": 266, "csa2-2x": 152, "csa2-4x": 78, "csa2-8x": 43}
OPTIONS = {
    "ratio": "auto",
    "hot_tokens": 128,
    "protect_tokens": 64,
    "shared_format": "fp8",
    "tail_format": "ratio",
    "high_watermark": 0.8,
    "calibration": "/calibration",
    "rope": "rotated",
    "impl": "cpu",
    "impl_detail": "avx512",
}


def stats(options=None, **changes):
    """Statistics of a server that is used and well."""
    return {
        "arena_bytes": 1_000_000,
        "used_bytes": 300_000,
        "slab_bytes": 320_000,
        "live_bytes": 100_000,
        "pages": dict.fromkeys(FORMATS, 0) | {"bf16": 20, "fp8": 100, "fp4": 800},
        "page_bytes": FORMATS,
        "compression_ratio": 3.1,
        "target_ratio": 1.0,
        "prompt_tokens_total": 100_000,
        "prefix_hit_tokens_total": 80_000,
        "evicted_tokens_total": 0,
        "documents": 0,
        "pinned_bytes": 0,
        "options": OPTIONS | (options or {}),
    } | changes


def case(
    *, before=None, metrics=("", ""), loads=(), arguments=None, options=None, pinned=(), calibration_fault=None, **changes
):
    """A case of one server.

    Args:
        before: changes of the statistics in the first reading; None: the same as in the last one.
        metrics: Prometheus text of both readings.
        pinned: answer of /csa2/documents.
        changes: of the statistics in the last reading.
    """
    last = stats(options, **changes)
    first, second = (Metrics(text) if text else None for text in metrics)
    return Case(
        first=Reading(last if before is None else stats(options, **before), first),
        last=Reading(last, second),
        seconds=5.0,
        loads=tuple(loads),
        arguments=arguments or {"page_size": 64},
        documents=tuple(pinned),
        calibration_fault=calibration_fault,
    )


def load(running, waiting=0, retracted=0, limit=4096):
    return Load(running=running, waiting=waiting, retracted=retracted, limit=limit)


def decoding(*phases):
    """Readings of a server one second apart: each phase is (requests in a step, tokens per second)."""
    loads = [Load()]
    for batch, rate in phases:
        last = loads[-1]
        steps = rate / batch
        done = Load(
            running=batch,
            steps=last.steps + steps,
            batch_sum=last.batch_sum + batch * steps,
            tokens=last.tokens + rate,
            busy_us=last.busy_us + 1e6,
        )
        loads.append(done)
    return loads


def histogram(name, mean, count):
    """Prometheus text of a histogram, in two series as SGLang has them."""
    lines = [f'sglang:{name}_bucket{{le="+Inf",is_streaming="true"}} {count / 2}']
    for streaming in ("true", "false"):
        lines.append(f'sglang:{name}_sum{{is_streaming="{streaming}"}} {mean * count / 2}')
        lines.append(f'sglang:{name}_count{{is_streaming="{streaming}"}} {count / 2}')
    return "\n".join(lines) + "\n"
