"""A tiny Llama with random weights, a tokenizer that knows some words, and text of those words."""

from pathlib import Path

import torch

LAYERS, HEADS, GROUPS, DIM = 2, 4, 2, 32
WORDS = [f"w{i}" for i in range(200)]


def write_tiny_llama(folder: Path) -> Path:
    """Write model and tokenizer to `folder`, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=DIM,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def write_text(path: Path, words: int, seed: int = 1) -> Path:
    """Write random words to `path`, and return it."""
    order = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text(" ".join(WORDS[i] for i in order))
    return path
