"""`--csa2-rope separated` and the rotary embeddings of models: which are taken, which are refused, and by what name."""

from types import SimpleNamespace

import pytest
import torch
from codec_bounds import U16, rotation_slack
from resolving import resolve, write_model
from torch import nn

from csa2.errors import OptionError
from csa2.options import CacheOptions
from sglang_csa2 import rope as rope_module
from sglang_csa2.model import rotation_of
from sglang_csa2.rope import check_rope, separable_rope

SEPARATED = CacheOptions(rope="separated")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
KNOWN = {"default": None, "linear": {"rope_type": "linear", "factor": 4.0}, "llama3": LLAMA3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
OTHERS = {
    "YaRNScalingRotaryEmbedding": YARN,
    "DynamicNTKScalingRotaryEmbedding": {"rope_type": "dynamic", "factor": 2.0},
    "DynamicNTKAlphaRotaryEmbedding": {"rope_type": "dynamic", "alpha": 2.0},
    "MRotaryEmbedding": {"rope_type": "default", "mrope_section": [8, 12, 12]},
}


def make_module(scaling, *, dim=64, rotary_dim=64, neox=True, dtype=torch.float32, positions=4096):
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(dim, rotary_dim, positions, 10000, neox, scaling, dtype)


def a_model(monkeypatch, *modules):
    """A model whose attention layers have these rotary modules, one each; None for a layer without."""
    layers = []
    for module in modules:
        block = nn.Module()
        if module is not None:
            block.rotary_emb = module
        layers.append(block)
    found = [(f"layers.{i}", block, None) for i, block in enumerate(layers)]
    monkeypatch.setattr(rope_module, "attention_layers", lambda model: iter(found))
    monkeypatch.setattr("sglang_csa2.model.attention_layers", lambda model: iter(found))
    return nn.ModuleList(layers)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_are_turned_as_the_module_turns_them(monkeypatch, dtype, rotary_dim, neox, kind):
    """The module computes angles in fp32 and keeps its table in the dtype of the model: rounding of angles up to 4096, of
    the table, and of the result."""
    module = make_module(KNOWN[kind], rotary_dim=rotary_dim, neox=neox, dtype=dtype)
    model = a_model(monkeypatch, module, module)
    rope = separable_rope(SEPARATED, model, rotation_of(model, 64))
    assert rope is not None
    keys = torch.randn(128, 1, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(128) * 32
    theirs = module.forward_native(positions, keys.flatten(1).to(dtype), keys.flatten(1).to(dtype))[1].view(128, 1, 64)
    ours = rope.rotate(keys.to(dtype), positions[:, None])
    unit = U16 if dtype == torch.bfloat16 else 0.0
    allowed = rotation_slack(keys) + (4 * unit + 4096 * 2.0**-22) * keys.norm(dim=-1)
    assert bool(((theirs.float() - ours).norm(dim=-1) <= allowed).all())


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_refused_by_name(monkeypatch, name):
    model = a_model(monkeypatch, make_module(OTHERS[name]))
    with pytest.raises(OptionError, match=f"does not know the rotary embedding '{name}'"):
        separable_rope(SEPARATED, model, rotation_of(model, 64))


def test_a_module_that_does_something_else_than_its_class_is_refused(monkeypatch):
    module = make_module(None, positions=2048)
    module.cos_sin_cache = module.cos_sin_cache.roll(1, 0)
    model = a_model(monkeypatch, module)
    with pytest.raises(OptionError, match="does not reproduce the angles of this model's RotaryEmbedding"):
        separable_rope(SEPARATED, model, rotation_of(model, 64))


@pytest.mark.parametrize("second", [None, "llama3"])
def test_layers_that_differ_are_refused(monkeypatch, second):
    model = a_model(monkeypatch, make_module(None), second and make_module(KNOWN[second]))
    with pytest.raises(OptionError, match=r"'layers.0' and 'layers.1' of this model rotate differently"):
        separable_rope(SEPARATED, model, rotation_of(model, 64))


def test_a_model_without_rotation_is_refused(monkeypatch):
    model = a_model(monkeypatch, None, None)
    with pytest.raises(OptionError, match="needs a model with a rotary embedding"):
        separable_rope(SEPARATED, model, rotation_of(model, 64))


def test_rotated_keys_ask_nothing_of_the_model(monkeypatch):
    model = a_model(monkeypatch, make_module(YARN), None)
    assert separable_rope(CacheOptions(), model, rotation_of(model, 64)) is None
    check_rope(CacheOptions(), SimpleNamespace(hf_text_config=SimpleNamespace(rope_parameters=YARN)))


def test_one_kind_of_layer_is_enough_to_be_refused():
    kinds = {"full_attention": {"rope_type": "default"}, "sliding_attention": YARN}
    with pytest.raises(OptionError, match="'yarn'"):
        check_rope(SEPARATED, SimpleNamespace(hf_text_config=SimpleNamespace(rope_parameters=kinds)))


def test_the_server_is_refused_before_anything_starts(tmp_path):
    yarn = str(write_model(tmp_path / "yarn", rope_parameters={**YARN, "rope_theta": 10000.0}))
    with pytest.raises(OptionError, match="does not know the rotary embedding 'yarn'"):
        resolve("--model-path", yarn, "--kv-compress", "csa2", "--csa2-rope", "separated")
    plain = str(write_model(tmp_path / "plain"))
    with pytest.raises(OptionError, match="cannot be combined with --csa2-impl cpu"):
        resolve("--model-path", plain, "--kv-compress", "csa2", "--csa2-rope", "separated", "--csa2-impl", "cpu")


def test_auto_is_the_reference_and_the_log_says_so(tmp_path, capsys):
    plain = str(write_model(tmp_path / "plain"))
    record = resolve("--model-path", plain, "--kv-compress", "csa2", "--csa2-rope", "separated")
    assert record.csa2_rope == "separated"
    assert "compiled code does not read --csa2-rope separated" in capsys.readouterr().err
