"""The target ratio at work on a store: what new old pages become, who is relieved, when memory is free."""

from dataclasses import replace

import pytest
import torch
from page_stores import CLASSES, GEOMETRY, REDUCED, SIZE, full_pages, make_store

from csa2.codec.channels import make_rotation
from csa2.codec.codec import make_codec
from csa2.errors import OptionError
from csa2.facts import Usage
from csa2.formats import FP8, PLAIN, make_ladder
from csa2.options import CacheOptions
from csa2.store import PageStore
from csa2.tail_ratio import TailRatio

LADDER = make_ladder(GEOMETRY, "fp4", reduced=REDUCED)
CODEC = make_codec(GEOMETRY, make_rotation(32, neox=True), CLASSES * len(REDUCED))
AUTO = CacheOptions()
WARM = LADDER.warm


class Server:
    """A store of which pages 1, 2, ... are read by one request, the last `warm` of them in its warm window."""

    def __init__(self, pages: int, options: CacheOptions = AUTO, warm: int = 0, num_slabs: int = 12) -> None:
        self.store: PageStore = make_store(num_slabs=num_slabs, ladder=LADDER, codec=CODEC)
        self.pages = torch.arange(1, pages + 1)
        full_pages(self.store, self.pages.tolist())
        self.store.facts.depth[self.pages] = self.pages.to(torch.int32)
        self.warm = self.pages > pages - warm
        self.ratio = TailRatio(self.store, options, self.usage)

    def usage(self) -> Usage:
        return Usage.of(self.pages, torch.zeros_like(self.warm), self.warm, 24)

    def formats(self) -> list[int]:
        return self.store.arena.formats[self.pages].tolist()


def test_it_starts_at_4_bits_and_follows_memory():
    server = Server(2)
    server.store.seal(torch.empty(0, dtype=torch.int64), server.pages)
    assert server.formats() == [WARM, WARM]
    assert server.ratio.controller.target == 1


def test_above_the_high_watermark_pages_in_use_go_to_their_roles_and_no_further_than_needed():
    """23 plain pages of 24: fresh ones to 4 bits first, and use falls below the watermark at once."""
    server = Server(23, warm=4)
    server.ratio.look()
    assert server.ratio.controller.target > 1
    formats = server.formats()
    assert set(formats) <= {PLAIN, WARM, LADDER.index("csa2-2x")}
    total = server.store.arena.plan.arena_bytes
    assert 0.6 * total < server.store.live_bytes(server.usage()) <= 0.8 * total
    server.ratio.look()
    assert server.formats() == formats
    server.store.check_integrity()


def test_a_larger_target_makes_old_pages_smaller_and_leaves_warm_ones():
    options = CacheOptions(high_watermark=0.05, low_watermark=0.01)
    server = Server(20, options, warm=5)
    for _ in range(40):
        server.ratio.look()
    assert server.ratio.controller.target == 8
    assert server.formats() == [LADDER.end] * 15 + [WARM] * 5


def test_looks_come_with_generated_tokens():
    server = Server(23)
    server.ratio.after_tokens(63)
    assert server.formats() == [PLAIN] * 23
    server.ratio.after_tokens(1)
    assert server.formats() != [PLAIN] * 23


def test_a_fixed_ratio_holds_and_can_be_given_back():
    server = Server(23)
    server.ratio.set(4)
    server.ratio.after_tokens(1000)
    assert (server.formats(), server.ratio.controller.target) == ([PLAIN] * 23, 4)
    server.store.seal(torch.empty(0, dtype=torch.int64), server.pages)
    assert server.formats() == [LADDER.index("csa2-4x")] * 23
    server.ratio.set(None)
    assert server.ratio.controller.is_automatic


def test_a_ratio_between_two_formats_is_mixed():
    server = Server(23)
    server.ratio.set(4 / 3)
    server.store.seal(torch.empty(0, dtype=torch.int64), server.pages)
    counts = torch.bincount(server.store.arena.formats[server.pages].long(), minlength=6).tolist()
    assert counts[WARM] + counts[WARM + 1] == 23
    assert abs(counts[WARM] - counts[WARM + 1]) <= 3


@pytest.mark.parametrize(("options", "ratio"), [(CacheOptions(ratio="1"), None), (CacheOptions(ratio="1"), 2)])
def test_a_server_without_the_formats_says_what_to_start(options, ratio):
    server = Server(1)
    server.store.ladder = make_ladder(GEOMETRY, "fp4")
    fixed = TailRatio(server.store, options, server.usage)
    with pytest.raises(OptionError, match="--csa2-ratio auto"):
        fixed.set(ratio)
    assert fixed.controller.target == 1


def test_memory_is_free_until_what_is_live_reaches_the_watermark():
    few, many = Server(8), Server(23)
    assert few.ratio.is_roomy(few.pages)
    assert many.ratio.is_roomy(many.pages), "as FP8 pages they take half"
    assert not many.ratio.is_roomy(many.pages[:2])
    few.ratio.set(1)
    assert not few.ratio.is_roomy(few.pages), "a fixed ratio is a fixed ratio"


def test_pages_of_prompts_wait_in_the_shared_format():
    server = Server(8)
    server.store.facts.prompt[server.pages[:4]] = True
    server.store.seal(server.pages, roomy=server.ratio.is_roomy(server.pages))
    assert server.formats() == [FP8] * 4 + [WARM] * 4


def test_the_ladder_may_have_one_of_the_smaller_formats():
    server = Server(1)
    server.store.ladder = replace(LADDER, layouts=(*LADDER.layouts[: WARM + 1], LADDER.layouts[-1]))
    assert TailRatio(server.store, CacheOptions(ratio="8"), server.usage).largest == 8
    assert SIZE == 16
