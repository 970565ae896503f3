"""Where pages begin in their sequences: noted when tokens are written, compared with what separated pages store."""

import torch
from torch import Tensor

from csa2.arena import Arena
from csa2.errors import IntegrityError
from csa2.facts import PageFacts
from csa2.formats import FormatLadder
from sgl_kernels.page_codec.positions import gather_first_positions


def record_positions(facts: PageFacts, slots: Tensor, positions: Tensor | None, page_size: int) -> None:
    """Note where the pages of `slots` (T,) begin, whose tokens stand at `positions` (T,).

    Raises:
        IntegrityError: nobody gave positions, or one does not follow from where its page begins.
    """
    if positions is None:
        raise IntegrityError("keys are separated from positions that nobody gave")
    used = slots >= page_size  # not the padding page
    pages, begin = slots[used] // page_size, (positions - slots % page_size)[used]
    known = facts.position[pages]
    facts.position[pages] = begin
    wrong = (begin % page_size != 0) | ((known >= 0) & (known != begin)) | (facts.position[pages] != begin)
    if bool(wrong.any()):
        i = int(torch.nonzero(wrong)[0])
        raise IntegrityError(
            f"a token that would make page {int(pages[i])} begin at position {int(begin[i])} is written to it, where "
            f"others begin at {int(known[i])} (-1: none), and every page at a multiple of {page_size}"
        )


def check_positions(facts: PageFacts, arena: Arena, ladder: FormatLadder) -> None:
    """Every page with tokens knows where it begins, and a compressed one says the same.

    Raises:
        IntegrityError: names what does not.
    """
    if bool((facts.position[facts.written > 0] < 0).any()):
        raise IntegrityError("a page with tokens has no position")
    for index, layout in enumerate(ladder.layouts):
        if not layout.is_separated:
            continue
        pages = torch.nonzero(arena.formats == index).squeeze(-1)
        stored = gather_first_positions(arena.buffer, arena.offsets[pages], layout)
        if not torch.equal(stored, facts.position[pages]):
            raise IntegrityError(f"a {layout.name} page holds another position than was recorded for it")
