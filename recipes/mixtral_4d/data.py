"""Text, tokens and the global order of batches. Used by the parallel run and by the single-process reference alike."""

from __future__ import annotations

from pathlib import Path

import torch
from config import Config, ConfigError

__all__ = ["global_batch", "load_tokens"]


def load_tokens(config: Config) -> tuple[torch.Tensor, int]:
    """Return ``(tokens, vocab_size)``: an int64 vector of the whole text, and how many different tokens there are.

    Raises:
        ConfigError: the text is empty, shorter than one sequence, or unreadable.
    """
    text = _text(config)
    if config.tokenizer is None:
        tokens, vocab_size = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), 256
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, local_files_only=True)
        tokens, vocab_size = torch.tensor(tokenizer(text.decode(errors="replace"))["input_ids"]), len(tokenizer)
    if len(tokens) <= config.seq:
        raise ConfigError(
            f"expected a text with more tokens than --seq {config.seq}, got {len(tokens)}; use more text or a smaller "
            "--seq"
        )
    return tokens, vocab_size


def _text(config: Config) -> bytes:
    if config.data is None:
        from pydoc_data.topics import topics  # about 700 kB of English that every CPython carries

        return "\n".join(topics[key] for key in sorted(topics)).encode()
    try:
        text = Path(config.data).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--data: expected a readable file, got {config.data} ({error.strerror}); choose another"
        ) from error
    if not text:
        raise ConfigError(f"--data: expected a file with text, got the empty {config.data}; choose another")
    return text


def global_batch(tokens: torch.Tensor, config: Config, step: int) -> dict[str, torch.Tensor]:
    """Return the batch of ``step``: ``(batch, seq)`` int64 ids, and the same as labels (the model shifts them).

    It depends on the seed and the step alone, so every rank, every layout and a resumed run see the same order.
    """
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - config.seq, (config.batch,), generator=generator)
    ids = torch.stack([tokens[start : start + config.seq] for start in starts])
    return {"input_ids": ids, "labels": ids}
