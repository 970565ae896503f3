"""Packed weights: the same products, no more memory, and new weights can still be loaded."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear  # noqa: E402
from sglang.srt.layers.logits_processor import LogitsProcessor, should_apply_lm_head_quant_method  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod  # noqa: E402
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding  # noqa: E402
from sglang.srt.model_executor.model_runner_components.weight_exporter import WeightExporter  # noqa: E402
from sglang.srt.model_loader.loader import DefaultModelLoader  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sglang_csa2 import packed_linear  # noqa: E402
from sglang_csa2.packed_linear import EXPORT_ERROR, PackedHeadMethod, PackedLinearMethod, copied_bytes, pack_model  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 products on this machine"
)

CPU = torch.device("cpu")
HIDDEN, INNER, VOCABULARY = 96, 160, 128
STEP_BF16 = 2.0**-8
"""Largest relative error of one rounding to bf16."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(kind: type, rows: int, columns: int, *, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A layer of SGLang without the process groups that its constructor asks for."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.quant_method = UnquantizedLinearMethod()
    made.weight = nn.Parameter(random(rows, columns, seed=seed, dtype=dtype), requires_grad=False)
    made.weight.weight_loader = "its own"
    made.bias = None
    return made


def logits_processor(**changes: object) -> nn.Module:
    made = LogitsProcessor.__new__(LogitsProcessor)
    nn.Module.__init__(made)
    plain = {"use_fp32_lm_head": False, "use_fp32_lm_head_output": False, "rl_on_policy_target": None}
    for name, value in {**plain, **changes}.items():
        setattr(made, name, value)
    return made


def table(kind: type = VocabParallelEmbedding) -> nn.Module:
    made = kind(VOCABULARY, HIDDEN, params_dtype=torch.bfloat16, enable_tp=False)
    made.weight.data = random(VOCABULARY, HIDDEN, seed=3)
    return made


class OtherMethod(UnquantizedLinearMethod):
    """Stands for a quantised layer: a method that is not the plain one."""


class Model(nn.Module):
    """What the packing looks at in a model."""

    def __init__(self, *, tied: bool = False, **changes: object) -> None:
        super().__init__()
        self.embed_tokens = table()
        self.up = layer(ColumnParallelLinear, INNER, HIDDEN)
        self.down = layer(RowParallelLinear, HIDDEN, INNER)
        self.router = layer(ReplicatedLinear, 8, HIDDEN)
        self.lm_head = self.embed_tokens if tied else table(ParallelLMHead)
        self.logits_processor = logits_processor(**changes)


def apply(module: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return module.quant_method.apply(module, x, bias)


@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_plain_weight(tokens, bias):
    model = Model()
    x, b = random(tokens, HIDDEN, seed=4), random(INNER, seed=5) if bias else None
    plain = functional.linear(x, model.up.weight, b)
    pack_model(model, "all", has_adapters=False)
    out = apply(model.up, x, b)
    assert out.dtype == plain.dtype
    assert out.shape == plain.shape
    # Both sum in fp32 and round the sum once; sums in another order may round to the other neighbour.
    size = (x.float().abs() @ random(INNER, HIDDEN, seed=1).float().abs().T) * 2.0**-20 * HIDDEN
    assert bool(((out.float() - plain.float()).abs() <= 2 * STEP_BF16 * plain.float().abs() + size).all())
    into = torch.empty_like(plain)
    assert model.up.quant_method.apply_into(model.up, x, into, b) is into
    assert torch.equal(into, out)


def test_inputs_of_any_shape_and_stride():
    model = Model()
    x = random(2, 5, 2 * HIDDEN, seed=4)[..., ::2]
    plain = functional.linear(x, model.up.weight)
    pack_model(model, "layers", has_adapters=False)
    out = apply(model.up, x)
    assert out.shape == plain.shape
    assert bool(((out.float() - plain.float()).abs() <= 2 * STEP_BF16 * (plain.float().abs() + 1)).all())


def test_weights_are_replaced():
    model = Model()
    plain = model.up.weight
    pack_model(model, "all", has_adapters=False)
    for module in (model.up, model.down, model.lm_head):
        assert module.weight.is_mkldnn
    assert isinstance(model.up.quant_method, PackedLinearMethod)
    assert isinstance(model.lm_head.quant_method, PackedHeadMethod)
    assert plain.nbytes == 0
    assert copied_bytes(model) == 0
    assert torch.equal(model.up.weight.to_dense(), random(INNER, HIDDEN, seed=1))


def test_what_is_not_packed():
    """Routers, whose weights models read themselves; other dtypes, devices, strides and methods; what others read too."""
    model = Model()
    model.wide = layer(ColumnParallelLinear, INNER, HIDDEN, dtype=torch.float32)
    model.fp16 = layer(RowParallelLinear, INNER, HIDDEN, dtype=torch.float16)
    model.experts = layer(ColumnParallelLinear, INNER, HIDDEN)
    model.experts.weight.data = random(4, INNER, HIDDEN)
    model.strided = layer(ColumnParallelLinear, INNER, HIDDEN)
    model.strided.weight.data = random(HIDDEN, INNER).T
    model.elsewhere = layer(ColumnParallelLinear, INNER, HIDDEN)
    model.elsewhere.weight = nn.Parameter(model.elsewhere.weight.to("meta"), requires_grad=False)
    model.amx = layer(ColumnParallelLinear, INNER, HIDDEN)
    model.amx.use_intel_amx_backend = True
    model.quantised = layer(ColumnParallelLinear, INNER, HIDDEN)
    model.quantised.quant_method = OtherMethod()
    model.view = layer(ColumnParallelLinear, INNER, HIDDEN)
    whole = random(2 * INNER, HIDDEN)
    model.view.weight.data = whole[:INNER]
    model.twin = layer(ColumnParallelLinear, INNER, HIDDEN)
    model.other_twin = layer(ColumnParallelLinear, INNER, HIDDEN)
    model.other_twin.weight = model.twin.weight
    pack_model(model, "all", has_adapters=False)
    assert {name for name, weight in model.named_parameters() if weight.is_mkldnn} == {
        "up.weight", "down.weight", "lm_head.weight",
    }  # fmt: skip
    assert type(model.quantised.quant_method) is OtherMethod
    for module in (model.router, model.wide, model.view, model.twin, model.amx, model.embed_tokens):
        assert type(module.quant_method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@pytest.mark.parametrize("change", ["meta", "float32", "amx", "quantised"])
def test_heads_that_are_not_packed(change):
    """Not even as a copy."""
    model = Model()
    if change == "amx":
        model.lm_head.use_intel_amx_backend = True
    elif change == "quantised":
        model.lm_head.quant_method = OtherMethod()
    else:
        to = {"meta": {"device": "meta"}, "float32": {"dtype": torch.float32}}[change]
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(**to), requires_grad=False)
    method = model.lm_head.quant_method
    pack_model(model, "all", has_adapters=False)
    assert model.lm_head.quant_method is method
    assert not model.lm_head.weight.is_mkldnn
    assert copied_bytes(model) == 0


def test_a_server_with_adapters_keeps_plain_weights(caplog):
    """A wrapper of SGLang holds the parameter of the layer it wraps, and new weights are loaded through it."""
    model = Model(tied=True)
    with caplog.at_level("INFO"):
        pack_model(model, "all", has_adapters=True)
    assert "LoRA" in caplog.text
    assert not model.up.weight.is_mkldnn
    assert copied_bytes(model) == 0
    assert not hasattr(model, "_weight_export_error")


def test_a_cpu_without_the_products_keeps_plain_weights(caplog, monkeypatch):
    monkeypatch.setattr(packed_linear, "_obstacle", lambda *, has_adapters: "oneDNN has no bf16 products on this CPU")
    model = Model()
    with caplog.at_level("INFO"):
        pack_model(model, "all", has_adapters=False)
    assert "oneDNN" in caplog.text
    assert not model.up.weight.is_mkldnn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inputs_of_another_dtype_are_an_error_as_they_are_for_plain_weights(dtype):
    model = Model()
    x = random(2, HIDDEN, dtype=dtype)
    with pytest.raises(RuntimeError):
        apply(model.up, x)
    pack_model(model, "all", has_adapters=False)
    with pytest.raises(RuntimeError):
        apply(model.up, x)


@pytest.mark.parametrize("tie", ["same module", "same weight"])
def test_shared_head_gets_a_copy(tie):
    model = Model(tied=tie == "same module")
    if tie == "same weight":
        model.lm_head.weight = model.embed_tokens.weight
    pack_model(model, "all", has_adapters=False)
    assert copied_bytes(model) == VOCABULARY * HIDDEN * 2
    ids = torch.tensor([3, 1])
    rows = random(VOCABULARY, HIDDEN, seed=3)
    assert torch.equal(model.embed_tokens.quant_method.embedding(model.embed_tokens, ids), rows[ids])
    x = random(2, HIDDEN, seed=4)
    out = apply(model.lm_head, x).float()
    plain = functional.linear(x, rows).float()
    assert bool(((out - plain).abs() <= 2 * STEP_BF16 * (plain.abs() + 1)).all())
    assert should_apply_lm_head_quant_method(model.lm_head, model.lm_head.quant_method)


def test_layers_leaves_a_shared_head_alone():
    model = Model(tied=True)
    pack_model(model, "layers", has_adapters=False)
    assert type(model.lm_head.quant_method) is UnquantizedEmbeddingMethod
    assert model.up.weight.is_mkldnn
    assert copied_bytes(model) == 0


@pytest.mark.parametrize(
    "change", [{"use_fp32_lm_head": True}, {"use_fp32_lm_head_output": True}, {"rl_on_policy_target": "x"}]
)
def test_heads_with_logits_in_another_precision_are_left_alone(change):
    model = Model(**change)
    pack_model(model, "all", has_adapters=False)
    assert type(model.lm_head.quant_method) is UnquantizedEmbeddingMethod
    assert model.up.weight.is_mkldnn


def test_none_changes_nothing():
    model = Model()
    pack_model(model, "none", has_adapters=False)
    assert type(model.up.quant_method) is UnquantizedLinearMethod
    assert not hasattr(model, "_weight_export_error")


@pytest.mark.parametrize("tied", [False, True])
def test_new_weights(tied):
    """As SGLang loads them: restore, write into the parameter that knows its loader, process."""
    model = Model(tied=tied)
    loaded = model.up.weight
    pack_model(model, "all", has_adapters=False)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    assert model.up.weight is loaded
    assert model.up.weight.weight_loader == "its own"
    assert torch.equal(model.up.weight, random(INNER, HIDDEN, seed=1))
    x = random(4, HIDDEN, seed=4)
    assert torch.equal(apply(model.up, x), functional.linear(x, model.up.weight))
    new_up, new_head = random(INNER, HIDDEN, seed=8), random(VOCABULARY, HIDDEN, seed=9)
    model.up.weight.data.copy_(new_up)
    model.lm_head.weight.data.copy_(new_head)
    DefaultModelLoader.postprocess_weights(model, CPU)
    assert model.up.weight.is_mkldnn
    assert torch.equal(model.up.weight.to_dense(), new_up)
    assert torch.equal(model.lm_head.csa2_packed.to_dense(), new_head)
    for module, weight in ((model.up, new_up), (model.lm_head, new_head)):
        plain = functional.linear(x, weight).float()
        assert bool(((apply(module, x).float() - plain).abs() <= 2 * STEP_BF16 * (plain.abs() + 1)).all())


def test_writing_past_the_restore_is_an_error():
    model = Model()
    pack_model(model, "all", has_adapters=False)
    with pytest.raises(RuntimeError):
        model.up.weight.data.copy_(random(INNER, HIDDEN))
    with pytest.raises(NotImplementedError):
        model.up.weight.data.narrow(0, 0, 1)


def test_a_copy_that_was_not_restored_follows_its_weight():
    model = Model(tied=True)
    pack_model(model, "all", has_adapters=False)
    new = random(VOCABULARY, HIDDEN, seed=9)
    model.embed_tokens.weight.data.copy_(new)
    DefaultModelLoader.postprocess_weights(model, CPU)
    assert torch.equal(model.lm_head.csa2_packed.to_dense(), new)


def test_reading_weights_out_is_refused_with_the_way_on(caplog):
    model = Model()
    model.get_weights_by_name = lambda *args, **kwargs: pytest.fail("was asked")
    pack_model(model, "all", has_adapters=False)
    runner = SimpleNamespace(tp_rank=0, tp_size=1, gpu_id=0, get_model_path=lambda: "", get_model=lambda: model)
    assert WeightExporter(**vars(runner)).get_weights_by_name("up.weight") is None
    assert EXPORT_ERROR in caplog.text
