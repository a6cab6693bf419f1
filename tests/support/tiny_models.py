"""Tiny random models and tokenizers, saved as users save theirs. Deterministic, under 1 s."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make_tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_positions: int = 128,
    seed: int = 0,
    head_rows: int | None = None,
    is_tied: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Save a random Llama and a tokenizer of the words w0 .. w{vocab_size - 1}.

    Args:
        folder: where to; created.
        vocab_size: real tokens.
        hidden_size: width, a multiple of 4 heads.
        num_layers: decoder layers.
        max_positions: longest row.
        seed: of the weights.
        head_rows: rows of the head, `vocab_size` by default; more are padding.
        is_tied: head and embedding share their weight.
        dtype: of the saved weights.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=head_rows or vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=is_tied,
        # Wide enough that distributions of different seeds are far apart.
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    make_number_tokenizer(vocab_size).save_pretrained(folder)
    return folder


def make_number_tokenizer(
    vocab_size: int, *, swapped: tuple[int, int] | None = None
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of the words w0, w1, ...; `swapped` exchanges the ids of two."""
    ids = {f"w{index}": index for index in range(vocab_size)}
    if swapped is not None:
        first, second = (f"w{index}" for index in swapped)
        ids[first], ids[second] = ids[second], ids[first]
    backend = Tokenizer(models.WordLevel(ids, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="w0", eos_token="w1", unk_token="w2", pad_token="w1"
    )
