"""What stands for FlashInfer's wrappers where there is no device.

Calls are held against its real signatures, and what it would compute is computed in float64, from nothing but what it gets.
"""

import inspect
import math

import pytest
import torch
from torch import Tensor

real = pytest.importorskip("flashinfer")
DECODE = real.BatchDecodeWithPagedKVCacheWrapper
PREFILL = real.BatchPrefillWithPagedKVCacheWrapper


def bound(function, *args, **kwargs) -> dict:
    """Arguments by name, as the real function takes them."""
    found = inspect.signature(function).bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments


class Stand:
    """What the two stand-ins share: attention in float64 over the pages of a CSR plan."""

    def __init__(self, *args, **kwargs) -> None:
        self.made = bound(self.wrapper.__init__, self, *args, **kwargs)
        assert self.made["kv_layout"] == "HND"
        if self.made["jit_args"] is not None:
            assert self.made["backend"] == "fa2"  # FlashInfer refuses "auto" with a variant

    def attend(self, query: Tensor, cache: Tensor, extra: tuple, run: dict) -> None:
        keys, values = cache[:, 0].float().double(), cache[:, 1].float().double()
        group = query.shape[1] // cache.shape[2]
        for b in range(len(self.last)):
            ids = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            count = max(0, len(ids) - 1) * cache.shape[3] + int(self.last[b])
            rows = slice(int(self.starts[b]), int(self.starts[b + 1]))
            k, v = (x[ids].transpose(0, 1).flatten(1, 2)[:, :count].repeat_interleave(group, 0) for x in (keys, values))
            logits = torch.einsum("thd,hnd->thn", query[rows].double(), k)
            if extra:
                bias, scale, page_stride, head_stride = extra
                assert (page_stride, head_stride) == (bias.stride(0), bias.stride(1))
                steps = bias[ids].transpose(0, 1).flatten(1, 2)[:, :count].repeat_interleave(group, 0)
                logits = logits * scale + steps.double() / 16
            else:
                logits = logits * self.sm_scale * (run["k_scale"] or 1.0)
            run["lse"][rows] = (torch.logsumexp(logits, -1) / math.log(2)).float()
            run["out"][rows] = torch.einsum("thn,hnd->thd", torch.softmax(logits, -1), v).to(query.dtype)
        if run["v_scale"] is not None:
            run["out"] *= run["v_scale"]

    def run(self, query, cache, *args, **kwargs) -> None:
        run = bound(self.wrapper.run, self, query, cache, *args, **kwargs)
        assert run["return_lse"]
        assert query.dtype == self.types["q_data_type"]
        assert cache.dtype == self.types["kv_data_type"]
        jit = self.made["jit_args"]
        assert len(args) == (len(jit[7]) + len(jit[9]) if jit else 0)
        self.attend(query, cache, args, run)


class StandDecode(Stand):
    wrapper = DECODE

    def plan(self, *args, **kwargs) -> None:
        plan = bound(self.wrapper.plan, self, *args, **kwargs)
        assert plan["deprecated_positional_args"] == ()
        self.types = bound(self.wrapper._plan_impl, self, *args, **kwargs)
        self.indptr, self.indices, self.last = (plan[name] for name in ("indptr", "indices", "last_page_len"))
        self.sm_scale = self.types["sm_scale"]
        self.starts = torch.arange(len(self.last) + 1)


class StandPrefill(Stand):
    wrapper = PREFILL

    def plan(self, *args, **kwargs) -> None:
        self.types = plan = bound(self.wrapper.plan, self, *args, **kwargs)
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "qo_indptr", "sm_scale")
        self.indptr, self.indices, self.last, self.starts, self.sm_scale = (plan[name] for name in names)
        assert plan["causal"] is False
