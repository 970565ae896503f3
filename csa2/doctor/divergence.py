"""Where prompts first differ, and what stands there."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import median

from csa2.doctor.finding import Finding
from csa2.doctor.prompt_file import Prompts, Unit

SHOWN_BEFORE, SHOWN_AFTER = 60, 40
"""Characters of text that are shown."""
SHOWN_BRANCHES = 3
COMPARED_UNITS = 2048
"""After the difference, when looking for text that is the same again."""
WORTH_IT = 0.1
"""Of a prompt."""
CHARACTERS_A_TOKEN = 4
"""About, in English."""
_VARYING = (
    ("a date or time", re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}")),
    ("a date or time", re.compile(r"(?i)\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b")),
    ("a UUID", re.compile(r"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")),
    ("an identifier", re.compile(r"(?i)\b(?=[a-z]*\d)(?=\d*[a-z])[0-9a-z]{8,}\b")),
    ("a number", re.compile(r"\d+")),
)


@dataclass(frozen=True)
class Divergence:
    """The first place where most prompts differ."""

    prompts: int
    unit: str
    common: int
    """Units before it."""
    median_units: float
    """Of a prompt."""
    before: str
    branches: tuple[tuple[str, int], ...]
    """What follows, and in how many prompts; the most frequent first. Empty: they never differ."""
    kind: str | None
    """What the differing text looks like."""
    same_again: int
    """Units that two of the prompts have in common after it, in one piece."""


def find_divergence(prompts: Prompts) -> Divergence:
    """The first place at which no continuation is that of more than half of the prompts that came so far.

    Prompts that leave the others before it are left out.
    """
    common, group = _first_split(prompts.units)
    branches = Counter(prompt[common] for prompt in group).most_common() if group else []
    samples = {unit: next(p for p in group if p[common] == unit) for unit, _ in branches}
    longest = group[0] if group else max(prompts.units, key=len)
    window = max(SHOWN_BEFORE, SHOWN_AFTER)
    before = prompts.text(longest[max(0, common - window) : common])[-SHOWN_BEFORE:]
    after = {unit: prompts.text(sample[common : common + window])[:SHOWN_AFTER] for unit, sample in samples.items()}
    pair = list(samples.values())[:2]
    return Divergence(
        prompts=len(prompts.units),
        unit=prompts.name,
        common=common,
        median_units=median(len(prompt) for prompt in prompts.units),
        before=before,
        branches=tuple((after[unit], count) for unit, count in branches[:SHOWN_BRANCHES]),
        kind=_kind(before, list(after.values())),
        same_again=_same_again(pair[0], pair[1], common) if len(pair) == 2 else 0,
    )


def divergence_finding(found: Divergence, page_size: int) -> Finding | None:
    """A finding if pages lie behind the difference that prompts could share."""
    page = page_size if found.unit == "tokens" else page_size * CHARACTERS_A_TOKEN
    if found.same_again < max(page, WORTH_IT * found.median_units):
        return None
    shows = " | ".join(f"{text!r} ({count})" for text, count in found.branches)
    looks = f" It looks like {found.kind}." if found.kind else ""
    return Finding(
        name="prompts-differ-early",
        title="Prompts differ early",
        seen=f"{found.prompts} prompts of {found.median_units:.0f} {found.unit} (median) share the first "
        f"{found.common}, {found.common // page} whole pages. Behind {found.before!r} follow {shows}; after it "
        f"{found.same_again} {found.unit} are the same again.{looks}",
        why=f"prompts are found in the cache from their first token on, by whole pages of {page_size}: nothing behind this "
        f"place is",
        fix=(
            f"move {found.kind or 'what varies'} behind what is the same, best into the last message",
            "leave it out, or make it coarser (the day instead of the second)",
            'then pin the shared text: POST /csa2/documents, or "custom_params": {"csa2_static": true}',
        ),
        anchor="low-hit-rate",
    )


def describe(found: Divergence) -> str:
    """One line about prompts that need no finding."""
    if not found.branches:
        return f"{found.prompts} prompts agree over the first {found.common} {found.unit}, where all but one end"
    return f"{found.prompts} prompts of {found.median_units:.0f} {found.unit} (median): most share the first {found.common}"


def _first_split(prompts: Sequence[Sequence[Unit]]) -> tuple[int, list[Sequence[Unit]]]:
    """Position of the split, and the prompts that reach it together; none if they end before they differ."""
    group, position = list(prompts), 0
    while True:
        group = [prompt for prompt in group if len(prompt) > position]
        if len(group) < 2:
            return position, []
        unit, count = Counter(prompt[position] for prompt in group).most_common(1)[0]
        if 2 * count <= len(group):
            return position, group
        group = [prompt for prompt in group if prompt[position] == unit]
        position += 1


def _same_again(one: Sequence[Unit], other: Sequence[Unit], start: int) -> int:
    """Length of the longest piece that both have in common after `start`."""
    left, right = one[start : start + COMPARED_UNITS], other[start : start + COMPARED_UNITS]
    return SequenceMatcher(None, left, right, autojunk=False).find_longest_match().size


def _kind(before: str, after: Sequence[str]) -> str | None:
    """What stands at the border in every branch."""

    def spans(pattern: re.Pattern[str], text: str) -> bool:
        return any(match.start() <= len(before) < match.end() for match in pattern.finditer(before + text))

    for name, pattern in _VARYING:
        if after and all(spans(pattern, text) for text in after[:SHOWN_BRANCHES]):
            return name
    return None
