"""The screen of `csa2 top`: readings in, lines out. Plain ASCII; colours, where there are any, repeat what letters say."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from csa2.stats import CacheStats
from csa2.top.readings import Reading, Readings
from csa2.units import format_bytes

RESET = "\x1b[0m"
MIN_WIDTH = 20
_NAME_COLUMNS = 24


class Span(NamedTuple):
    """Text in one colour."""

    text: str
    colour: int | None = None
    """Code of an ANSI colour."""


Line = Sequence[Span]


class Part(NamedTuple):
    """What fills a part of the arena."""

    name: str
    mark: str
    colour: int | None
    pages: int | None
    num_bytes: int


# A format keeps mark and colour whatever the ladder.
_MARKS = {"fp8": ("8", 33), "k8v4": ("k", 93), "fp4": ("4", 32), "int4": ("4", 32)}
_MARKS |= {"csa2-2x": ("x", 36), "csa2-4x": ("m", 34), "csa2-8x": ("M", 35)}
_PLAIN = ("#", 31)


def arena_parts(stats: CacheStats) -> list[Part]:
    """The formats in the order of the ladder, then what slabs lose, then what is free."""
    parts = []
    for index, (name, pages) in enumerate(stats.pages.items()):
        mark, colour = _PLAIN if index == 0 else _MARKS.get(name, ("?", None))
        parts.append(Part(name, mark, colour, pages, pages * stats.page_bytes.get(name, 0)))
    parts.append(Part("not used in slabs", "-", None, None, max(0, stats.slab_bytes - stats.used_bytes)))
    parts.append(Part("free", ".", None, None, max(0, stats.arena_bytes - stats.slab_bytes)))
    return parts


def lines(url: str, readings: Readings, width: int) -> list[Line]:
    """The whole screen, at most `width` columns wide when painted."""
    reading = readings.last
    stats = reading.stats
    parts = arena_parts(stats)
    return [
        [Span(f"csa2 top  {url}")],
        [],
        bar(parts, stats.arena_bytes, width),
        *_format_lines(parts, stats),
        [],
        _fact("arena in use", f"{_share(stats.slab_bytes, stats.arena_bytes)} of {format_bytes(stats.arena_bytes)}"),
        _fact("  in tenths, till now", _tenths(readings.use, width - _NAME_COLUMNS)),
        _fact("  live", _share(stats.live_bytes, stats.arena_bytes)),
        _fact("tokens held", f"{stats.logical_tokens} of {stats.capacity_tokens}"),
        _fact("compression", f"{stats.compression_ratio:.2f}x against bf16, target ratio {stats.target_ratio:.2f}"),
        *_guard_lines(stats),
        *_rate_lines(readings, stats),
        [],
        *_pressure_lines(readings, stats),
        [],
        *_document_lines(reading),
    ]


def bar(parts: Sequence[Part], arena_bytes: int, width: int) -> Line:
    """The arena as a bar of `width` columns; what has anything gets one, if there are columns to take."""
    columns = [max(1, part.num_bytes * width // max(1, arena_bytes)) if part.num_bytes else 0 for part in parts]
    columns[columns.index(max(columns))] += width - sum(columns)
    return [Span(part.mark * count, part.colour) for part, count in zip(parts, columns, strict=True)]


def paint(line: Line, width: int, colours: bool) -> str:
    """The text of a line, cut to `width` columns. What a terminal would obey is shown as a question mark."""
    painted, left = "", width
    for text, colour in line:
        shown = "".join(char if char.isprintable() else "?" for char in text[:left])
        left -= len(shown)
        painted += f"\x1b[{colour}m{shown}{RESET}" if colours and colour is not None and shown else shown
    return painted.rstrip()


def _format_lines(parts: Sequence[Part], stats: CacheStats) -> list[Line]:
    rows: list[Line] = []
    for part in parts:
        pages = "" if part.pages is None else f"{part.pages} pages"
        share = _share(part.num_bytes, stats.arena_bytes)
        text = f" {part.name:<18} {pages:>14} {format_bytes(part.num_bytes):>10} {share:>8}"
        rows.append([Span(part.mark, part.colour), Span(text)])
    return rows


def _guard_lines(stats: CacheStats) -> list[Line]:
    if not stats.guard_compared_total or stats.guard_agreement is None:
        return []
    text = f"{_share(stats.guard_agreement, 1)} of the last guarded steps, backed off: {stats.guard_backoffs_total}"
    return [_fact("agreement", text)]


def _rate_lines(readings: Readings, stats: CacheStats) -> list[Line]:
    hits, prompts = readings.gain(_hits), readings.gain(_prompts)
    lately = _share(hits, prompts) if hits is not None and prompts else "-"
    rows = [
        _fact("hit rate", f"{lately} in the last minute, {_share(_hits(stats), _prompts(stats))} since the start"),
        *([_fact("  found in", found)] if (found := _counts(stats.prefix_hit_tokens_by_format)) else []),
        _fact("prompt tokens", f"{_number(readings.rate(_prompts))} a second, {stats.prompt_tokens_total} since the start"),
    ]
    load = readings.last.load
    if load is None:
        note = readings.last.load_note
        return [*rows, _fact("generated, first token", note)]
    return [
        *rows,
        _fact(
            "generated tokens", f"{_number(readings.generated_rate())} a second, {load.generated_tokens:.0f} since the start"
        ),
        _fact("time to first token", f"{_seconds(readings.ttft_s(0.5))} median, {_seconds(readings.ttft_s(0.95))} for 95 %"),
        _fact("requests", f"{load.running:.0f} running, {load.waiting:.0f} waiting"),
    ]


def _pressure_lines(readings: Readings, stats: CacheStats) -> list[Line]:
    def row(name: str, count: Callable[[CacheStats], float]) -> Line:
        return _fact(name, f"{_number(readings.gain(count), 0)} in the last minute, {count(stats):.0f} since the start")

    steps = _counts(stats.demotions_total)
    return [
        row("pages demoted", lambda s: sum(s.demotions_total.values())),
        *([_fact("  by step", steps)] if steps else []),
        row("tokens evicted", lambda s: s.evicted_tokens_total),
        row("pages moved", lambda s: s.compactions_total),
    ]


def _document_lines(reading: Reading) -> list[Line]:
    stats = reading.stats
    if not reading.documents and not stats.documents:
        return [_fact("pinned documents", reading.documents_note)]
    note = "" if reading.documents else f"; {reading.documents_note}"
    rows = [
        _fact("pinned documents", f"{stats.documents}, {stats.pinned_pages} pages, {format_bytes(stats.pinned_bytes)}{note}")
    ]
    for one in reading.documents:
        formats = _counts(one.formats)
        state = one.state if not one.message else f"{one.state}: {one.message}"
        text = f"{one.tokens} tokens, {format_bytes(one.bytes)}, {one.hits} hits, {state}"
        rows.append(_fact(f"  {one.id}", text + (f" ({formats})" if formats else "")))
    return rows


def _prompts(stats: CacheStats) -> float:
    return stats.prompt_tokens_total


def _hits(stats: CacheStats) -> float:
    return stats.prefix_hit_tokens_total


def _fact(name: str, value: str) -> Line:
    return [Span(f"{name:<{_NAME_COLUMNS - 1}} {value}")]


def _counts(counts: Mapping[str, int]) -> str:
    """Those that are not 0: "bf16 64, fp8 448"."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _tenths(use: Sequence[float], width: int) -> str:
    """One digit a reading, 9 for everything above nine tenths; the newest last."""
    digits = [str(min(9, int(10 * share))) for share in use]
    return "".join(digits[-max(1, width) :])
