"""The compressed cache of transformers, on tiny models with random weights and on the demo model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from other_device import PretendedDevice, on_device
from tiny_llama import DIM, GROUPS, LAYERS, WORDS, write_tiny_llama

from csa2.errors import ArenaFullError, CalibrationError, IntegrityError, OptionError, UnsupportedModelError
from csa2.impl import resolve_impl
from csa2.integrations.transformers import CompressedCache
from csa2.integrations.transformers_model import _bias_ratio

PAGE = 64
SMALL = {"hot_tokens": 64, "warm_tokens": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def text(tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(len(WORDS), (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cache: Any, chunks: tuple[int, ...]) -> torch.Tensor:
    """Of all tokens, fed in `chunks`."""
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(chunks, dim=1)]
    return torch.cat(parts, dim=1).float()


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("chunks", [(100,), (70, 30), (64, 35, 1), (98, 1, 1)])
def test_uncompressed_pages_give_what_transformers_gives(model: Any, impl: str, chunks: tuple[int, ...]) -> None:
    """All lies in the hot window. Both compute in bf16, in another order: a few of its steps (2^-8) apart."""
    from transformers import DynamicCache

    ids = text(100, batch=2)
    expected = logits(model, ids, DynamicCache(config=model.config), chunks)
    cache = CompressedCache(model, impl=impl, max_tokens=256)
    found = logits(model, ids, cache, chunks)
    assert (found - expected).abs().max() < 4 * 2**-8 * expected.abs().max()
    assert cache.get_seq_length() == 100
    assert cache.pages == {"bf16": 4, **dict.fromkeys([n for n in cache.pages if n != "bf16"], 0)}
    assert cache.compression_ratio == 1


@pytest.mark.parametrize(("ratio", "smallest"), [("1", "fp4"), ("2", "csa2-2x"), ("4", "csa2-4x"), ("8", "csa2-8x")])
def test_old_pages_are_compressed(model: Any, ratio: str, smallest: str) -> None:
    cache = CompressedCache(model, ratio, **SMALL)
    logits(model, text(640), cache, (320, 318, 1, 1))
    # 10 pages: the newest in the hot window, one more in the warm one, the first stays while there is memory.
    assert cache.pages["bf16"] == 2
    assert cache.pages[smallest] == (8 if ratio == "1" else 7)
    assert cache.used_bytes == sum(n * b for n, b in zip(cache.pages.values(), cache.ladder.page_bytes, strict=True))
    assert cache.compression_ratio == 10 * cache.ladder.page_bytes[0] / cache.used_bytes > 2
    assert cache.ladder.page_bytes[0] == 2 * 2 * LAYERS * GROUPS * DIM * PAGE
    sequences = cache.sequences(1)
    sequences.store.check_integrity()
    cache.reset()
    assert (cache.get_seq_length(), cache.used_bytes, cache.compression_ratio) == (0, 0, 1)


def test_the_ratio_follows_memory(model: Any) -> None:
    """An arena of six uncompressed pages takes a text of 20."""
    arena = 6 * 2 * 2 * LAYERS * GROUPS * DIM * PAGE
    cache = CompressedCache(model, arena_size=str(arena), adjust_interval=64, **SMALL)
    logits(model, text(20 * PAGE), cache, (PAGE,) * 20)
    assert cache.used_bytes <= arena
    assert sum(count for name, count in cache.pages.items() if name.startswith("csa2-")) > 0
    cache.sequences(1).store.check_integrity()


def test_generation_goes_on_after_a_turn(model: Any) -> None:
    ids = text(300)
    cache = CompressedCache(model, "4", **SMALL)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    more = torch.cat((first, text(40, seed=1)), dim=1)
    second = model.generate(more, past_key_values=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert second.shape[1] == 300 + 8 + 40 + 8
    # The last token that is generated is not computed on.
    assert cache.get_seq_length() == second.shape[1] - 1


def test_other_caches_stay_usable(model: Any) -> None:
    ids = text(200)
    before = model.generate(ids, max_new_tokens=8, do_sample=False)
    CompressedCache(model)
    assert model.generate(ids, max_new_tokens=8, do_sample=False).equal(before)


def test_what_does_not_fit_is_named(model: Any) -> None:
    cache = CompressedCache(model, max_tokens=256)
    with pytest.raises(ArenaFullError, match=r"400 tokens more of 1 sequences of 0 do not fit into an arena of"):
        logits(model, text(400), cache, (400,))
    # Nothing was taken: a shorter text goes.
    logits(model, text(100), cache, (100,))
    assert cache.pages["bf16"] == 2


def test_an_interrupted_pass_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompressedCache(model)
    last = model.model.layers[-1]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            logits(model, text(10), cache, (10,))
    with pytest.raises(IntegrityError, match=r"call reset\(\)"):
        logits(model, text(10), cache, (10,))
    cache.reset()
    logits(model, text(10), cache, (10,))


def test_padding_is_refused(model: Any) -> None:
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :3] = 0
    with pytest.raises(OptionError, match="no padding"):
        model.generate(text(20, 2), attention_mask=mask, past_key_values=CompressedCache(model), max_new_tokens=2)


@pytest.mark.parametrize(
    ("more", "named"),
    [({"num_beams": 2}, "beam search"), ({"prompt_lookup_num_tokens": 2}, "assisted")],
)
def test_what_takes_tokens_back_is_refused(model: Any, more: dict[str, Any], named: str) -> None:
    # Both names of it: transformers refuses some of them itself.
    ids = text(8).repeat(1, 6)
    with pytest.raises((OptionError, ValueError)) as raised:
        model.generate(ids, past_key_values=CompressedCache(model), max_new_tokens=12, **more)
    assert named in str(raised.value) or "1 sequences and the model is given 2" in str(raised.value)


def test_another_batch_is_refused(model: Any) -> None:
    cache = CompressedCache(model)
    logits(model, text(10), cache, (10,))
    with pytest.raises(OptionError, match="holds 1 sequences and the model is given 3"):
        logits(model, text(10, 3), cache, (10,))


def test_another_attention_is_refused(model: Any) -> None:
    cache = CompressedCache(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(OptionError, match="'sdpa'"):
        logits(model, text(10), cache, (10,))


def test_gradients_are_refused(model: Any) -> None:
    with pytest.raises(OptionError, match="no gradient"):
        model(text(10), past_key_values=CompressedCache(model), use_cache=True)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"ratio": "3"}, OptionError, "--csa2-ratio '3'"),
        ({"documents": "x"}, OptionError, "by a server only"),
        ({"impl": "cuda"}, OptionError, "--csa2-impl cuda"),
        ({"calibration": "/nowhere"}, CalibrationError, "nowhere"),
    ],
)
def test_bad_options_are_refused(model: Any, options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        CompressedCache(model, **options)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sliding_window": 128}, "sliding window of 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attn_logit_softcapping": 30.0}, "capped"),
        ({"kv_lora_rank": 64}, "latents"),
        ({"num_kv_shared_layers": 1}, "keys of others"),
    ],
)
def test_other_attention_is_refused_by_name(model: Any, changed: dict[str, Any], named: str) -> None:
    for name, value in changed.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedModelError, match=named):
        CompressedCache(model)


def test_kernels_for_cuda_in_the_interpreter(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, of which pages are compressed, and two tokens more; the reference computes the same with other sums, so
    within a few steps of bf16 (2^-8)."""
    ids = text(3 * PAGE + 2)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    resolve_impl.cache_clear()
    with pytest.raises(OptionError, match="--csa2-impl cuda needs a CUDA device"):
        CompressedCache(model, impl="cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    resolve_impl.cache_clear()
    chunks, options = (3 * PAGE, 1, 1), {"ratio": "8", "max_tokens": 256, **SMALL}
    with interpreted():
        found = logits(model, ids, CompressedCache(model, impl="cuda", **options), chunks)
    resolve_impl.cache_clear()
    expected = logits(model, ids, CompressedCache(model, impl="reference", **options), chunks)
    assert (found - expected).abs().max() < 4 * 2**-8 * expected.abs().max()


@pytest.mark.gpu
def test_a_model_on_a_gpu(model: Any) -> None:
    """The same as on the CPU; tensor cores sum in another order: a few steps of bf16 (2^-8) apart."""
    ids = text(10 * PAGE)
    options = {"ratio": "8", "max_tokens": 1024, **SMALL}
    expected = logits(model, ids, CompressedCache(model, impl="reference", **options), (600, 39, 1))
    on_gpu = model.to("cuda")
    found = logits(on_gpu, ids.cuda(), CompressedCache(on_gpu, impl="cuda", **options), (600, 39, 1)).cpu()
    assert (found - expected).abs().max() < 8 * 2**-8 * expected.abs().max()


def test_another_dtype_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="float64"):
        CompressedCache(model.double())


def test_a_layer_with_a_large_key_bias_keeps_its_channels() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[0] = 100
    assert CompressedCache(model).ladder.geometry.identity_layers == (1,)


def test_key_biases_are_looked_at_on_the_host() -> None:
    """Their shares are computed there, from positions, wherever the weights are."""
    projection = torch.nn.Linear(64, 32).to(torch.bfloat16)
    norm, shares = torch.ones(64, dtype=torch.bfloat16), torch.full((16,), 0.5)
    expected = _bias_ratio(projection, norm, 32, shares)
    with PretendedDevice():
        there = SimpleNamespace(weight=on_device(projection.weight.data), bias=on_device(projection.bias.data))
        assert torch.equal(_bias_ratio(there, on_device(norm), 32, shares), expected)


@pytest.mark.e2e
def test_the_demo_model_in_five_lines(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import csa2

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    inputs = tokenizer("The capital of France is Paris. " * 60 + "The capital of France is", return_tensors="pt")
    calibration = Path(csa2.__file__).parent / "calibrations" / "smollm2-135m-instruct"
    cache = CompressedCache(model, "4", calibration=str(calibration), **SMALL)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert cache.pages["csa2-4x"] > 0
