"""A Llama GGUF file as an ordinary Hugging Face checkpoint directory: what the default model is shipped as.

Only what SmolLM2 needs: the `llama` architecture with tied embeddings and a GPT-2 style byte-level BPE vocabulary.
Quantised tensors are expanded to float32 by the `gguf` package and stored as bfloat16, the dtype the model was
trained in. The tokenizer is rebuilt from the file's own vocabulary and merges.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.progress import Progress, no_progress

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN = 3  # GGUF's token type for special tokens


def convert_gguf(gguf_path: Path, out_dir: Path, progress: Progress = no_progress) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    Args:
        gguf_path: a Llama GGUF file with tied embeddings.
        out_dir: an existing directory; files in it are overwritten.
        progress: called with the tensors' share that is done.
    """
    from gguf import GGUFReader

    progress("reading the GGUF file", 0.0)
    reader = GGUFReader(gguf_path)
    config = model_config(reader)
    write_json(out_dir / "config.json", config)
    write_json(out_dir / "generation_config.json", generation_config(reader))
    write_tokenizer(reader, out_dir, model_max_length=config["max_position_embeddings"])
    write_weights(reader, config, out_dir / "model.safetensors", progress)


def field(reader: GGUFReader, name: str) -> Any:
    """The value of one GGUF metadata key."""
    return reader.fields[name].contents()


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """The `LlamaConfig` of the file, as a dict for config.json."""
    heads, hidden = field(reader, "llama.attention.head_count"), field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field(reader, "llama.context_length"),
        # GGUF holds it as float32: 1e-05 comes back as 9.999999747378752e-06
        "rms_norm_eps": float(f"{field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "vocab_size": field(reader, "llama.vocab_size"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
    }


def generation_config(reader: GGUFReader) -> dict[str, Any]:
    """Special ids for generation_config.json."""
    return {
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
    }


def write_tokenizer(reader: GGUFReader, out_dir: Path, model_max_length: int) -> None:
    """tokenizer.json (byte-level BPE, each digit its own token) and tokenizer_config.json with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    # what GGUF's pre-tokenizer name "smollm" stands for: single numeric characters, then GPT-2's split
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type in zip(tokens, types, strict=True) if type == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out_dir / "tokenizer.json"))
    write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[field(reader, "tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[field(reader, "tokenizer.ggml.eos_token_id")],
            "pad_token": tokens[field(reader, "tokenizer.ggml.padding_token_id")],
            "unk_token": tokens[field(reader, "tokenizer.ggml.unknown_token_id")],
            "clean_up_tokenization_spaces": False,
            "model_max_length": model_max_length,
            "chat_template": field(reader, "tokenizer.chat_template"),
        },
    )


def write_weights(reader: GGUFReader, config: dict[str, Any], path: Path, progress: Progress) -> None:
    """Every tensor, expanded and renamed, as bfloat16 safetensors."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = unpermute(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = unpermute(values, config["num_key_value_heads"])
        # a copy, as arrays that view the file are read-only
        tensors[hf_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
        progress("converting the weights", done / len(reader.tensors))
    save_file(tensors, path, metadata={"format": "pt"})


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None or match[2] not in BLOCK_NAMES:
        raise ValueError(f"unexpected tensor in the GGUF file: {gguf_name}")
    return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.weight"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * dim, columns] from GGUF's order (rotary pairs side by side) to Hugging Face's (two halves)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
