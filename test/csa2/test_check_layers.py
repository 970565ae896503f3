"""Error by layer, on a model with random weights."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from csa2.check.layers import layer_errors

LAYERS = 2
EXACT = 1e-5
"""fp32 sums of at most 200 terms in another order."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a model of two layers, 4 query and 2 KV heads of 32 channels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    # Models are loaded with their tokenizer; this one is never asked.
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a"))).save_pretrained(folder)
    return folder


def tokens(count):
    return torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def test_nothing_is_lost_inside_the_hot_window(tiny):
    errors = layer_errors(tiny, tokens(128 + 64), 128, ["fp4", "csa2-8x"], [])
    assert errors.keys() == {"fp4", "csa2-8x"}
    for found in errors.values():
        assert len(found) == LAYERS
        assert max(found) < EXACT


def test_smaller_formats_lose_more(tiny):
    # Merged formats only against what they are made from: near-uniform attention, as random weights give, forgives merging.
    # Its keys are so small that their code hardly matters, so `k8v4` is not told from `fp4`.
    for names in (["fp8", "fp4", "csa2-2x"], ["fp8", "k8v4"], ["fp4", "csa2-4x"], ["fp4", "csa2-8x"]):
        errors = layer_errors(tiny, tokens(2048 + 64), 2048, names, [])
        for layer in range(LAYERS):
            losses = [errors[name][layer] for name in names]
            assert losses == sorted(losses)
            assert losses[0] > EXACT


def test_a_flagged_layer_keeps_its_own_basis(tiny):
    plain = layer_errors(tiny, tokens(512 + 64), 512, ["fp4"], [])["fp4"]
    flagged = layer_errors(tiny, tokens(512 + 64), 512, ["fp4"], [1])["fp4"]
    assert plain[0] == flagged[0]
    assert plain[1] != flagged[1]


def test_the_uncompressed_format_is_left_out(tiny):
    assert layer_errors(tiny, tokens(128), 64, ["bf16"], []) == {}


def test_separated_keys_are_measured_beside_rotated_ones(tiny):
    """Merging chooses the same, values are the same; keys are coded in another form."""
    names = ["fp8", "fp8 (separated)", "csa2-4x", "csa2-4x (separated)"]
    errors = layer_errors(tiny, tokens(2048 + 64), 2048, names, [])
    assert list(errors) == names
    for name in ("fp8", "csa2-4x"):
        for rotated, separated in zip(errors[name], errors[f"{name} (separated)"], strict=True):
            assert rotated != separated
            assert separated < 2 * rotated
