"""A small Llama as a GGUF file of the same make as the default model's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 64, 2, 4, 2, 96


def write(path: Path) -> Path:
    """Random weights (Q8_0 and F32), byte-level vocabulary with two merges, three special tokens."""
    import gguf
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if n < 3 else gguf.TokenType.NORMAL for n in range(len(tokens))])
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) / 8
        if len(shape) == 1 or shape[-1] % 32:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    kv_width = KV_HEADS * HIDDEN // HEADS
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", HIDDEN)
        add(block + "ffn_norm.weight", HIDDEN)
        add(block + "attn_q.weight", HIDDEN, HIDDEN)
        add(block + "attn_k.weight", kv_width, HIDDEN)
        add(block + "attn_v.weight", kv_width, HIDDEN)
        add(block + "attn_output.weight", HIDDEN, HIDDEN)
        add(block + "ffn_gate.weight", FFN, HIDDEN)
        add(block + "ffn_up.weight", FFN, HIDDEN)
        add(block + "ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
