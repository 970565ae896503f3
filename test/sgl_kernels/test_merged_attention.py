"""Attention over merged pages: an entry with a bias stands for exp(bias) entries. And pages of other sizes."""

import math

import pytest
import torch
from hard_pages import FORMATS, PAGE_SIZES, bases_of, biases, geometry, in_layer, layout_of, normal
from paged_scenes import LAYERS, PLAIN, Scene, as_written, make_scene, opened, oracle
from torch import Tensor

from sgl_kernels.page_codec.reference import Entries, seal_pages
from sgl_kernels.page_layout import PageLayout, plain_layout
from sgl_kernels.paged_attention.reference import decode, extend

MERGED = ("csa2-4x", "csa2-8x")


def page_scene(layout: PageLayout, bias: Tensor, repeat: int = 2) -> Scene:
    """An arena that is one merged page, read by one request."""
    g = layout.geometry
    bases = bases_of(g)
    packed = seal_pages(Entries(normal(layout, 1, 1), normal(layout, 1, 2), bias), layout, bases)
    return Scene(
        g,
        repeat,
        (plain_layout(PLAIN, g), layout),
        packed[0],
        torch.tensor([1], dtype=torch.int8),
        torch.tensor([0]),
        torch.tensor([[0]]),
        torch.tensor([g.page_size]),
        bases,
        [opened(packed[0], layout, bases)],
    )


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("size", PAGE_SIZES)
def test_an_entry_weighs_as_much_as_the_entries_it_stands_for(size, layer, name):
    """Weighted sums in float64 over the entries, each counted exp(bias) times."""
    layout = layout_of(name, geometry(64, 2, torch.float32, size))
    bias = biases(layout, 1)
    assert bias is not None
    scene = page_scene(layout, bias)
    query = scene.query(1)
    got = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.bases)
    held = scene.held[0]
    keys, values, count = held.keys[layer], held.values[layer], held.bias[layer].exp()
    logits = query.double().view(2, 2, 64) @ keys.transpose(-1, -2) * scene.scale
    weight = logits.exp() * count[:, None]
    want = (weight @ values / weight.sum(-1, keepdim=True)).view(1, 4, 64)
    _, bound = oracle(scene, held, layer, query)
    assert bool(((got - want).abs() <= bound).all())
    # Half a step of 1/16 nat, up to the largest bias: the weights of the page are those of its groups to 3 per cent.
    stored = in_layer(bias, layout, layer)[0].double().clamp(max=255 / 16)
    assert float((stored.exp() / count).log().abs().max()) <= 1 / 32 + 1e-6


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_bias_of_a_page_shifts_its_mass_against_other_pages(layer, name):
    """The same bias everywhere changes nothing inside a page, and makes it exp(bias) pages beside another."""
    layout = layout_of(name, geometry(64, 1, torch.float32))
    shape = (1, 2, layout.entries)
    one, many = (page_scene(layout, torch.full(shape, b)) for b in (0.0, 3.0))
    query = one.query(1)
    alone, alike = (decode(query, s.arena, s.plan(), layer, s.scale, s.bases) for s in (one, many))
    bound = oracle(one, one.held[0], layer, query)[1] + oracle(many, many.held[0], layer, query)[1]
    assert bool(((alone - alike).abs() <= bound).all())
    new = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(3))
    for scene in (one, many):
        held = scene.held[0]
        keys, values = held.keys[layer, 0], held.values[layer, 0]
        logit = (query[0].double() @ torch.cat((keys, new[0, 0].double())).T) * scene.scale
        weight = logit.exp()
        weight[:, :-1] *= math.exp(float(held.bias[layer, 0, 0]))
        want = weight @ torch.cat((values, new[1, 0].double())) / weight.sum(-1, keepdim=True)
        got = extend(query, *new, scene.arena, scene.plan(), layer, scene.scale, scene.bases)
        written = as_written(*(x.expand(2, -1, -1, -1) for x in new))
        bound = oracle(scene, held.followed_by(written), layer, query, new=1)[1]
        assert bool(((got - want).abs() <= bound).all())


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("layer", LAYERS)
def test_pages_of_other_sizes(layer, size):
    lengths = [1, size - 1, size, size + 1, (len(FORMATS) + 1) * size + 1]
    scene = make_scene(lengths, (64, 2, 2, torch.bfloat16), size=size)
    query = scene.query(len(lengths))
    out = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.bases)
    for i, held in enumerate(scene.held):
        want, bound = oracle(scene, held, layer, query[i : i + 1])
        assert bool(((out[i : i + 1] - want).abs() <= bound).all()), lengths[i]


def test_a_request_in_one_format_and_the_next_in_another():
    """Requests whose pages are all merged, beside requests of plain pages: each gets its own sums."""
    scenes = {name: make_scene([128, 128], (32, 1, 2, torch.float32), only=name) for name in (*MERGED, PLAIN)}
    mixed = make_scene([128, 128, 1], (32, 1, 2, torch.float32), only="csa2-8x")
    query = mixed.query(3)
    out = decode(query, mixed.arena, mixed.plan(), 0, mixed.scale, mixed.bases)
    for i, held in enumerate(mixed.held):
        want, bound = oracle(mixed, held, 0, query[i : i + 1])
        assert bool(((out[i : i + 1] - want).abs() <= bound).all())
    for scene in scenes.values():
        out = decode(query[:2], scene.arena, scene.plan(), 0, scene.scale, scene.bases)
        alone = decode(query[1:2], scene.arena, scene.plan(1), 0, scene.scale, scene.bases)
        assert bool(((out[1:] - alone).abs() <= 2 * oracle(scene, scene.held[1], 0, query[1:2])[1]).all())
