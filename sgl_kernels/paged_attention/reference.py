"""Attention over compressed pages in torch: the specification of every kernel.

Everything folds to the query side, except keys that are separated from their positions: they are opened and rotated. A page
gives a partial result and its log-sum-exp; the partials of a request are combined by one n-way merge. Queries are
(tokens, H, D); query head h reads KV head h // (H / G).
"""

import math

import torch
from torch import Tensor

from sgl_kernels.page_codec.positions import gather_positions
from sgl_kernels.page_codec.reference import CodecBases, Entries, open_layer
from sgl_kernels.page_layout import ALIGNMENT, PageLayout
from sgl_kernels.paged_attention.plan import FormatPages, PagePlan

WORKSPACE_VALUES = 1 << 23
"""fp32 values opened at a time (32 MiB) in decode: bounds its memory whatever the batch and the context."""
_FP16_MAX = torch.finfo(torch.float16).max


def gather_blocks(arena: Tensor, offsets: Tensor, layout: PageLayout, layer: int) -> Tensor:
    """(N, bytes of the layer) uint8: the block of `layer` in the pages at byte `offsets` (N,)."""
    start, size = layout.layer_range(layer)
    # Not a larger power of two, even where `size` is a multiple of one: slabs, and so pages, need not start on it.
    step = math.gcd(size, ALIGNMENT) if layout.is_plain else ALIGNMENT
    rows = (arena.numel() - size) // step + 1
    # Overlapping rows: row i is the block that starts at byte i * step, so one gather copies whole blocks.
    view = arena.as_strided((rows, size), (step, 1))
    return view.index_select(0, (offsets + start) // step)


def open_plain(arena: Tensor, offsets: Tensor, layout: PageLayout, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values (N, G, S, D) in the model dtype of plain pages."""
    g = layout.geometry
    block = gather_blocks(arena, offsets, layout, layer).view(g.dtype)
    pair = block.view(-1, 2, g.num_kv_heads, g.page_size, g.head_dim)
    return pair[:, 0], pair[:, 1]


def open_coded(arena: Tensor, offsets: Tensor, layout: PageLayout, layer: int, bases: CodecBases) -> Entries:
    """Entries of one layer of the coded pages at byte `offsets` (N,), in the bases that `open_layer` names."""
    block = gather_blocks(arena, offsets, layout, layer)
    return open_layer(block, layout, layer, bases, gather_positions(arena, offsets, layout, layer))


def write_plain(arena: Tensor, rows: Tensor, layout: PageLayout, layer: int, keys: Tensor, values: Tensor) -> None:
    """Store new tokens in plain pages.

    Args:
        rows: (T,) int64 from `plain_rows`.
        keys, values: (T, G, D).
    """
    g = layout.geometry
    table = arena.view(g.dtype).view(-1, g.head_dim)
    heads = torch.arange(g.num_kv_heads, device=rows.device) * g.page_size
    start = layer * 2 * g.num_kv_heads * g.page_size
    target = (rows[:, None] + (heads + start)[None, :]).reshape(-1)
    table.index_copy_(0, target, keys.reshape(-1, g.head_dim).to(g.dtype))
    table.index_copy_(0, target + g.num_kv_heads * g.page_size, values.reshape(-1, g.head_dim).to(g.dtype))


def plain_rows(page_offsets: Tensor, slots: Tensor, layout: PageLayout) -> Tensor:
    """Row of `slots` (T,) (place inside the page) of the plain pages at byte `page_offsets` (T,), layer 0, head 0."""
    g = layout.geometry
    return page_offsets // (g.head_dim * g.dtype.itemsize) + slots


def decode(query: Tensor, arena: Tensor, plan: PagePlan, layer: int, scale: float, bases: CodecBases) -> Tensor:
    """Attention of one new token per request over its pages.

    Args:
        query: (B, H, D) any float dtype, rotated.
        arena: (bytes,) uint8.
        plan: pages of the batch; each request needs at least one.
        scale: softmax scale.
        bases: matrices of the codec.

    Returns:
        (B, H, D) fp32.
    """
    batch, heads, dim = query.shape
    q = query.to(torch.float32)
    partials = []
    for part in plan.parts:
        geometry = part.layout.geometry
        block = max(1, WORKSPACE_VALUES // (geometry.num_kv_heads * geometry.page_size * dim * 2))
        for start in range(0, part.owner.numel(), block):
            piece = part.between(start, start + block)
            partials.append(_page_partials(q, arena, piece, layer, scale, bases))
    owner = torch.cat([p[0] for p in partials])
    top = torch.cat([p[1] for p in partials])
    best = torch.full((batch, heads), -math.inf, device=query.device)
    best.scatter_reduce_(0, owner[:, None].expand_as(top), top, "amax")
    weight = torch.exp(top - best[owner])
    mass = torch.zeros(batch, heads, device=query.device)
    mass.index_add_(0, owner, weight * torch.cat([p[2] for p in partials]))
    plain = torch.zeros(batch, heads, dim, device=query.device)
    flat = torch.zeros_like(plain)
    start = 0
    for pages, _, _, weighted, in_basis in partials:
        end = start + pages.numel()
        (flat if in_basis else plain).index_add_(0, pages, weighted * weight[start:end, :, None])
        start = end
    return (plain + flat @ bases.flat) / mass[..., None]


def _page_partials(
    q: Tensor, arena: Tensor, part: FormatPages, layer: int, scale: float, bases: CodecBases
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Per page: owner (N,), largest logit (N, H), sum of exp (N, H), weighted values (N, H, D), values in the basis?"""
    layout = part.layout
    g, d = layout.geometry.num_kv_heads, layout.geometry.head_dim
    n, heads = part.owner.numel(), q.shape[1]
    page_q = (q @ bases.flat if layout.folds_keys(layer) else q)[part.owner].view(n, g, heads // g, d)
    bias = None
    if layout.is_plain:
        keys, values = (x.float() for x in open_plain(arena, part.offsets, layout, layer))
    else:
        opened = open_coded(arena, part.offsets, layout, layer, bases)
        keys, values, bias = opened.keys, opened.values, opened.bias
    logits = (page_q @ keys.transpose(-1, -2)) * scale
    if bias is not None:
        logits = logits + bias.unsqueeze(-2)
    if layout.is_plain:
        beyond = torch.arange(layout.geometry.page_size, device=q.device)[None, :] >= part.lengths[:, None]
        logits = logits.masked_fill(beyond[:, None, None, :], -math.inf)
    top = logits.amax(-1)
    p = torch.exp(logits - top[..., None])
    weighted = (p @ values).reshape(n, heads, d)
    return part.owner, top.view(n, heads), p.sum(-1).view(n, heads), weighted, not layout.is_plain


def extend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    arena: Tensor,
    prefix: PagePlan,
    layer: int,
    scale: float,
    bases: CodecBases,
) -> Tensor:
    """Attention of T new tokens of one request over its pages and, causally, over themselves.

    Args:
        query: (T, H, D) rotated.
        keys, values: (T, G, D) of the same tokens.
        prefix: pages before the first new token (one request, may be empty).

    Returns:
        (T, H, D) in the dtype of `query`. Products are computed in that dtype, sums in fp32.
    """
    tokens, heads, dim = query.shape
    groups = keys.shape[1]
    repeat = heads // groups
    q = query.transpose(0, 1)[None]
    k = keys.transpose(0, 1).repeat_interleave(repeat, 0)[None]
    v = values.transpose(0, 1).repeat_interleave(repeat, 0)[None]
    outputs = [_flash(q, k, v, scale, causal=True)]
    # No mask towards the prefix: the query group can lie on the query axis, and each key is read once per group.
    grouped = q.reshape(1, groups, repeat * tokens, dim)
    for part in prefix.parts:
        part_k, part_v, bias, part_q = _open_prefix(grouped, arena, part, layer, bases)
        out, lse = _flash(part_q, part_k[None], part_v[None], scale, causal=False, bias=bias)
        if not part.layout.is_plain:
            out = (out.float() @ bases.flat).to(query.dtype)
        outputs.append((out.reshape(1, heads, tokens, dim), lse.reshape(1, heads, tokens)))
    return merge(outputs)[0].transpose(0, 1)


def merge(partials: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Combine partial results: outputs (..., D) with natural log-sum-exp (...), in the dtype of the first output."""
    if len(partials) == 1:
        return partials[0][0]
    lse = torch.stack([p[1].float() for p in partials])
    weight = torch.softmax(lse, 0)[..., None]
    total = (torch.stack([p[0].float() for p in partials]) * weight).sum(0)
    return total.to(partials[0][0].dtype)


def _open_prefix(
    grouped_q: Tensor, arena: Tensor, part: FormatPages, layer: int, bases: CodecBases
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Keys and values (G, entries, D) and bias (G, entries) of the pages of one request in one format, and the query in
    their basis."""
    dtype, groups, dim = grouped_q.dtype, grouped_q.shape[1], grouped_q.shape[-1]
    layout = part.layout
    if layout.is_plain:
        # Only the last page of a request may be partial, and only while it is plain.
        entries = int(part.lengths.sum())
        keys, values = open_plain(arena, part.offsets, layout, layer)
        keys = keys.transpose(0, 1).reshape(groups, -1, dim)[:, :entries].to(dtype)
        values = values.transpose(0, 1).reshape(groups, -1, dim)[:, :entries].to(dtype)
        return keys, values, None, grouped_q
    opened = open_coded(arena, part.offsets, layout, layer, bases)
    keys, values = (_narrow(x, dtype).transpose(0, 1).reshape(groups, -1, dim) for x in (opened.keys, opened.values))
    bias = None if opened.bias is None else opened.bias.transpose(0, 1).reshape(groups, -1)
    folds = layout.folds_keys(layer)
    return keys, values, bias, (grouped_q.float() @ bases.flat).to(dtype) if folds else grouped_q


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`. A saturated entry can exceed float16 in the flat basis, and infinity would become NaN later."""
    return x.clamp(-_FP16_MAX, _FP16_MAX).to(dtype) if dtype == torch.float16 else x.to(dtype)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(1, H, T, D) output and (1, H, T) natural log-sum-exp; `bias` (H, keys) is added to the logits."""
    if q.device.type == "cpu":
        mask = None if bias is None else bias[None, :, None, :].expand(1, -1, q.shape[2], -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    logits = (q.float() @ k.float().transpose(-1, -2)) * scale
    if bias is not None:
        logits = logits + bias[None, :, None, :]
    if causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    return (torch.softmax(logits, -1) @ v.float()).to(q.dtype), torch.logsumexp(logits, -1)
