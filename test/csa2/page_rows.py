"""Pages written as rows, for the tests of residency: what is known of each, its format, and any ladder."""

from dataclasses import replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from page_stores import LADDERS
from torch import Tensor

from csa2.facts import NO_CAP, PageFacts, Usage
from csa2.formats import PLAIN, UNMAPPED, FormatLadder
from csa2.value import Turnover

SIZE = 4
LADDER = LADDERS["fp4"]
TURNOVER = Turnover(mapped_total=40, mapped=10)
"""Ages of rows are whole numbers, and their worth is exact."""


class Pages(NamedTuple):
    """Rows as flat arrays."""

    facts: PageFacts
    formats: Tensor
    usage: Usage


@st.composite
def ladders(draw):
    """Any ladder, with any of its formats for shared pages and for old ones."""
    ladder = draw(st.sampled_from(list(LADDERS.values())))
    formats = range(ladder.end + 1)
    return replace(ladder, shared=draw(st.sampled_from([None, *formats])), tail=draw(st.sampled_from(formats)))


def with_shared(name: str | None, ladder: FormatLadder = LADDER) -> FormatLadder:
    return replace(ladder, shared=None if name is None else ladder.index(name))


def facts_of(rows: list[dict]) -> Pages:
    """Pages 1, 2, ...; a row may give any fact, age (in turnovers), format, users, and hot and warm (each implies use)."""
    facts = PageFacts.empty(len(rows) + 1)
    formats = torch.full((len(rows) + 1,), UNMAPPED, dtype=torch.int8)
    formats[0] = PLAIN
    users = torch.zeros(len(rows) + 1, dtype=torch.int64)
    hot = torch.zeros(len(rows) + 1, dtype=torch.bool)
    warm = torch.zeros_like(hot)
    for page, row in enumerate(rows, 1):
        facts.turn[page] = TURNOVER.mapped_total - TURNOVER.mapped * row.get("age", 0)
        facts.written[page] = row.get("written", SIZE)
        for name in ("last_use", "hits", "first", "prompt", "pinned", "static", "asked", "priority", "cap"):
            if name in row:
                getattr(facts, name)[page] = row[name]
        formats[page] = row.get("format", PLAIN)
        hot[page] = row.get("hot", False)
        warm[page] = row.get("warm", False) or row.get("hot", False)
        users[page] = max(row.get("users", 0), int(warm[page]))
    return Pages(facts, formats, Usage(users, hot, warm))


def some_rows(formats: int = 5):
    """Pages of any state; formats are counted from 0 and may be cut to those of the ladder by `fit`."""
    return st.lists(
        st.fixed_dictionaries(
            {
                "last_use": st.integers(0, 2),
                "age": st.integers(0, 3),
                "hits": st.sampled_from([0, 0, 1, 3]),
                "first": st.booleans(),
                "prompt": st.booleans(),
                "pinned": st.sampled_from([False, False, False, True]),
                "priority": st.sampled_from([0, 0, 0, 1]),
                "cap": st.sampled_from([NO_CAP, NO_CAP, 2, 3]),
                "written": st.sampled_from([0, SIZE - 1, SIZE, SIZE, SIZE]),
                "format": st.sampled_from([PLAIN, PLAIN, *range(1, formats), UNMAPPED]),
                "users": st.sampled_from([0, 0, 1, 2]),
                "hot": st.booleans(),
                "warm": st.booleans(),
            }
        ),
        max_size=12,
    )


def fit(rows: list[dict], ladder: FormatLadder) -> list[dict]:
    """The rows with formats of this ladder; first pages are never beyond what they are guarded from."""
    return [{**row, "format": min(row["format"], ladder.guard if row["first"] else ladder.end)} for row in rows]


def is_shared(row: dict) -> bool:
    return row.get("hits", 0) > 0 or row.get("pinned", False)


def in_use(row: dict) -> bool:
    return bool(row.get("users") or row.get("hot") or row.get("warm"))
