"""Eviction by the page from SGLang's own tree: against a plain model of sequences, step by step."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import publish, restore_context, snapshot_context
from sglang.srt.server_args import ServerArgs

from csa2.capacity import plan_arena
from csa2.codec.channels import make_rotation
from csa2.codec.codec import make_codec
from csa2.facts import Usage
from csa2.formats import make_ladder
from csa2.store import PageStore
from sgl_kernels.page_layout import PageGeometry
from sglang_csa2.allocator import Csa2Allocator
from sglang_csa2.radix import Csa2RadixCache, page_priority

PAGE = 64
GEOMETRY = PageGeometry(1, 1, 32, PAGE, torch.bfloat16)


class NoCodec:
    """Pages of the right size with nothing in them."""

    def __init__(self, sizes):
        self.sizes = sizes

    def seal(self, arena, wave, samples):
        counts = torch.bincount(wave.target, minlength=len(self.sizes)).tolist()
        return {i: torch.zeros(n, self.sizes[i], dtype=torch.uint8) for i, n in enumerate(counts) if n}


@pytest.fixture(autouse=True)
def published():
    before = snapshot_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test")
    yield
    restore_context(before)


class Cache:
    """Tree, allocator and arena without a model, and what requests do to them."""

    def __init__(self, plain_pages: int = 24, policy: str = "csa2") -> None:
        ladder = make_ladder(GEOMETRY, "fp4")
        plan = plan_arena(plain_pages * ladder.page_bytes[0], ladder.page_bytes)
        self.store = PageStore(ladder, plan, plan.max_pages + 1, make_codec(GEOMETRY, make_rotation(32, neox=True), ()))
        self.store.seal_with(NoCodec(ladder.page_bytes))
        kv = SimpleNamespace(store=self.store)
        self.allocator = Csa2Allocator(plan.max_pages * PAGE, PAGE, torch.bfloat16, "cpu", kv, False)
        self.tree = Csa2RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(size=2, max_context_len=4096, device="cpu", enable_memory_saver=False),
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                eviction_policy=policy,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.allocator.tree_cache = self.tree
        self.running: dict[int, tuple[tuple[int, ...], torch.Tensor, object]] = {}
        self.allocator.usage = self.usage

    def usage(self) -> Usage:
        pages = torch.cat([torch.empty(0, dtype=torch.int64), *(pages for _, pages, _ in self.running.values())])
        hot = torch.zeros_like(pages, dtype=torch.bool)
        return Usage.of(pages, hot, hot, self.store.facts.hits.numel())

    def match(self, text: tuple[int, ...], salt: str | None = None) -> tuple[torch.Tensor, object]:
        result = self.tree.match_prefix(MatchPrefixParams(key=key_of(text, salt)))
        return self.tree.path_device_indices(result.last_device_node)[::PAGE] // PAGE, result.last_device_node

    def start(self, name: int, text: tuple[int, ...], salt: str | None = None) -> bool:
        """A request with one token id a page."""
        prefix, node = self.match(text, salt)
        lock = self.tree.lock(node)
        slots = self.allocator.alloc((len(text) - prefix.numel()) * PAGE) if len(text) > prefix.numel() else torch.empty(0)
        if slots is None:
            self.tree.unlock(lock)
            return False
        pages = torch.cat((prefix, slots[::PAGE].long() // PAGE))
        self.store.clock += 1
        self.store.share(prefix)
        self.store.touch(pages, torch.zeros_like(pages), torch.arange(pages.numel()))
        self.store.record_writes((pages[prefix.numel() :, None] * PAGE + torch.arange(PAGE)).flatten())
        self.running[name] = (text, pages, (lock, prefix.numel(), salt))
        return True

    def finish(self, name: int, *, keep: bool = True) -> None:
        text, pages, (lock, known, salt) = self.running.pop(name)
        if keep:
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
            self.tree.insert(InsertParams(key=key_of(text, salt), value=slots, prev_prefix_len=known * PAGE))
        elif pages.numel() > known:
            self.allocator.free((pages[known:, None] * PAGE + torch.arange(PAGE)).flatten())
        self.tree.unlock(lock)

    def serve(self, text: tuple[int, ...], salt: str | None = None) -> None:
        assert self.start(-1, text, salt)
        self.finish(-1)

    def cached(self, text: tuple[int, ...], salt: str | None = None) -> int:
        return self.match(text, salt)[0].numel()


def key_of(text: tuple[int, ...], salt: str | None = None) -> RadixKey:
    return RadixKey(array("q", [token for token in text for _ in range(PAGE)]), salt)


def test_a_long_branch_loses_its_end_and_keeps_its_head():
    cache = Cache()
    cache.serve(tuple(range(20)))
    assert cache.tree.evict(EvictParams(num_tokens=5 * PAGE)).num_tokens_evicted == 5 * PAGE
    assert cache.cached(tuple(range(20))) == 15
    assert cache.tree.evicted_tokens_total == 5 * PAGE
    cache.tree.evict(EvictParams(num_tokens=1))
    assert cache.cached(tuple(range(20))) == 14
    assert not cache.allocator.verify_byte_accounting()


def test_what_two_requests_used_stays_longer():
    cache = Cache()
    for _ in range(4):
        cache.serve((1, 2))
    cache.serve((5, 6))
    cache.tree.evict(EvictParams(num_tokens=2 * PAGE))
    assert (cache.cached((1, 2)), cache.cached((5, 6))) == (2, 0)


def test_priority_comes_before_everything_else():
    cache = Cache()
    cache.serve((1, 2))
    cache.store.facts.priority[cache.match((1, 2))[0]] = 1
    for _ in range(3):
        cache.serve((5, 6))
    cache.tree.evict(EvictParams(num_tokens=2 * PAGE))
    assert (cache.cached((1, 2)), cache.cached((5, 6))) == (2, 0)


def test_namespaces_stay_apart_when_branches_are_cut():
    cache = Cache()
    cache.serve((1, 2, 3, 4), "a")
    cache.serve((1, 2, 3, 4), "b")
    cache.serve((1, 2, 3, 4), "b")
    cache.tree.evict(EvictParams(num_tokens=2 * PAGE))
    assert (cache.cached((1, 2, 3, 4), "a"), cache.cached((1, 2, 3, 4), "b"), cache.cached((1, 2))) == (2, 4, 0)


def test_locked_pages_are_never_evicted():
    cache = Cache()
    cache.serve((1, 2, 3))
    assert cache.start(0, (1, 2))
    assert cache.tree.evict(EvictParams(num_tokens=99 * PAGE)).num_tokens_evicted == PAGE
    assert cache.cached((1, 2, 3)) == 2
    cache.finish(0)
    assert cache.tree.evict(EvictParams(num_tokens=99 * PAGE)).num_tokens_evicted == 2 * PAGE


def test_equal_requests_at_the_same_time_share_what_the_first_inserted():
    cache = Cache()
    assert cache.start(0, (1, 2))
    assert cache.start(1, (1, 2))
    cache.finish(0)
    cache.finish(1)
    pages = cache.match((1, 2))[0]
    assert cache.store.facts.hits[pages].tolist() == [1, 1]
    assert cache.store.mapped_pages == 2


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
def test_policies_of_sglang_stay_usable(policy):
    cache = Cache(policy=policy)
    cache.serve(tuple(range(20)))
    assert cache.tree.evict(EvictParams(num_tokens=PAGE)).num_tokens_evicted == 20 * PAGE
    assert not cache.tree.evicts_pages


class ResidencyMachine(RuleBasedStateMachine):
    """Requests start, finish, are aborted; pages are pinned and sealed; memory gets short."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(plain_pages=12)
        self.known: set[tuple[int, ...]] = set()
        self.names = 0

    texts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)

    @rule(text=texts)
    @precondition(lambda self: len(self.cache.running) < 3)
    def start(self, text):
        self.names += 1
        before = {name: pages.clone() for name, (_, pages, _) in self.cache.running.items()}
        self.cache.start(self.names, text)
        for name, pages in before.items():
            assert torch.equal(self.cache.running[name][1], pages)

    @rule(data=st.data(), keep=st.booleans())
    @precondition(lambda self: self.cache.running)
    def end(self, data, keep):
        """Finished, or aborted."""
        name = data.draw(st.sampled_from(sorted(self.cache.running)))
        text = self.cache.running[name][0]
        self.cache.finish(name, keep=keep)
        if keep:
            assert self.cache.cached(text) == len(text)
            self.known.update(text[:n] for n in range(1, len(text) + 1))

    @rule(data=st.data(), pinned=st.booleans())
    @precondition(lambda self: self.known)
    def pin(self, data, pinned):
        text = data.draw(st.sampled_from(sorted(self.known)))
        self.cache.store.pin(self.cache.match(text)[0], pinned=pinned)

    @rule(data=st.data())
    @precondition(lambda self: self.known)
    def seal(self, data):
        pages = self.cache.match(data.draw(st.sampled_from(sorted(self.known))))[0]
        self.cache.store.seal(pages, roomy=data.draw(st.booleans()))

    @rule(pages=st.integers(1, 6))
    def press(self, pages):
        """Ends of branches go, one after the other: what stays of each text is a beginning of it."""
        before = {text: self.cache.cached(text) for text in self.known}
        locked = {page for _, held, _ in self.cache.running.values() for page in held.tolist()}
        went = self.cache.tree.evict(EvictParams(num_tokens=pages * PAGE)).num_tokens_evicted
        assert went <= pages * PAGE
        after = {text: self.cache.cached(text) for text in self.known}
        assert all(after[text] <= before[text] for text in self.known)
        assert all(int(self.cache.store.arena.formats[page]) >= 0 for page in locked)
        if went < pages * PAGE:
            assert self.cache.tree.evictable_size() == 0

    @invariant()
    def adds_up(self):
        cache = self.cache
        assert not cache.allocator.verify_byte_accounting()
        held = cache.tree.evictable_size() + cache.tree.protected_size()
        own = sum(pages.numel() - known for _, pages, (_, known, _) in cache.running.values())
        assert held // PAGE + own == cache.store.mapped_pages
        seen = [page for text in self.known for page in cache.match(text)[0].tolist()]
        assert all(int(cache.store.arena.formats[page]) >= 0 for page in seen)
        assert bool((cache.store.facts.hits[cache.store.arena.formats < 0] == 0).all())


def test_random_traces():
    fixed = settings(derandomize=True, deadline=None, max_examples=40, stateful_step_count=30)
    run_state_machine_as_test(ResidencyMachine, settings=fixed)


def test_any_priority_fits_the_facts_of_a_page():
    """A request without one has the least of 64 bits where SGLang schedules by priority, and clients send what they like."""
    least = -(2**63)
    assert page_priority(least, low_first=False) == -(2**31)
    assert page_priority(-least - 1, low_first=True) == -(2**31)
    assert page_priority(10**12, low_first=False) == 2**31 - 1
    assert page_priority(7, low_first=False) == 7
    assert page_priority(7, low_first=True) < page_priority(3, low_first=True)
