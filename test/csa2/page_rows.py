"""Pages written as rows, for the tests of residency: what is known of each, its format, and any ladder."""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from page_stores import LADDERS

from csa2.formats import PLAIN, UNMAPPED, FormatLadder
from csa2.residency import PageFacts

SIZE = 4
LADDER = LADDERS["fp4"]


@st.composite
def ladders(draw):
    """Any ladder, with any of its formats for shared pages and for old ones."""
    ladder = draw(st.sampled_from(list(LADDERS.values())))
    formats = range(ladder.end + 1)
    return replace(ladder, shared=draw(st.sampled_from([None, *formats])), tail=draw(st.sampled_from(formats)))


def with_shared(name: str | None, ladder: FormatLadder = LADDER) -> FormatLadder:
    return replace(ladder, shared=None if name is None else ladder.index(name))


def facts_of(rows: list[dict]) -> tuple[PageFacts, torch.Tensor, torch.Tensor]:
    """Facts, formats and hot pages of pages 1, 2, ...; a row may give use, hits, first, written, format and hot."""
    facts = PageFacts.empty(len(rows) + 1)
    formats = torch.full((len(rows) + 1,), UNMAPPED, dtype=torch.int8)
    formats[0] = PLAIN
    hot = []
    for page, row in enumerate(rows, 1):
        facts.last_use[page] = row.get("use", 0)
        facts.hits[page] = row.get("hits", 0)
        facts.first[page] = row.get("first", False)
        facts.written[page] = row.get("written", SIZE)
        formats[page] = row.get("format", PLAIN)
        if row.get("hot"):
            hot.append(page)
    return facts, formats, torch.tensor(hot, dtype=torch.int64)


def some_rows(formats: int = 5):
    """Pages of any state; formats are counted from 0 and may be cut to those of the ladder by `fit`."""
    return st.lists(
        st.fixed_dictionaries(
            {
                "use": st.integers(0, 4),
                "hits": st.integers(0, 2),
                "first": st.booleans(),
                "written": st.sampled_from([0, SIZE - 1, SIZE, SIZE, SIZE]),
                "format": st.sampled_from([PLAIN, PLAIN, *range(1, formats), UNMAPPED]),
                "hot": st.booleans(),
            }
        ),
        max_size=12,
    )


def fit(rows: list[dict], ladder: FormatLadder) -> list[dict]:
    """The rows with formats of this ladder; first pages are never beyond what they are guarded from."""
    return [{**row, "format": min(row["format"], ladder.guard if row["first"] else ladder.end)} for row in rows]
