"""Small tokenizers of both kinds, trained in a moment, as checkpoint directories."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The capital of France is Paris.",
    "hello world, hello there",
    "日本語のテキスト",
    "naïve café",
    "stop STOP now",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level(path: Path) -> Path:
    """GPT-2 style: every byte has a token, a character may be spread over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("zwölf ünits", special=False)])
    return save(tokenizer, path)


def sentencepiece_style(path: Path) -> Path:
    """Llama 2 style: U+2581 for spaces, unknown characters as byte tokens, a space put before the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    spec["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(tokenizer, path)


def save(tokenizer: Tokenizer, path: Path, **config: object) -> Path:
    """A directory with tokenizer.json and tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return path
