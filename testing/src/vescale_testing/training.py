"""One small training, run twice: by the unmodified program on one process, and by veScale on many.

The models are unmodified Hugging Face classes in tiny shapes that divide by 2 and 4. Both runs are in float64 with the
models' own casts to float32 kept in float64, so that a difference above 1e-10 is a bug and not rounding.

    expected = train_on_one(Training("mixtral"))
    actual = train_in_parallel(Training("mixtral"), Plan(dp=2, tp=2, pp=2, zero=1))      # in every rank
    assert_same_training(actual, expected, rtol=1e-10)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vescale_testing.compare import TrainingRecord
from vescale_testing.float64 import keep_float64

# The umbrella imports its parts at their first use. Use them here, so that forked ranks need not import them again.
with contextlib.suppress(ImportError):
    pass

_SHAPES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_SHAPES, "num_local_experts": 4}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SHAPES),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_head": 8, "n_positions": 64}),
}


@dataclass(frozen=True)
class Training:
    """The configuration of a training: model, data and steps.

    Attributes:
        family: `"mixtral"`, `"llama"` or `"gpt2"`.
        layers: Number of blocks.
        dropout: Attention dropout (GPT-2: every dropout).
        steps: Optimizer steps; AdamW with clipping to norm 1.
        batch: Sequences in the global batch.
        seq: Tokens in a sequence.
        overrides: Further entries of the Hugging Face configuration, as a tuple of pairs.
    """

    family: str = "mixtral"
    layers: int = 2
    dropout: float = 0.0
    steps: int = 3
    batch: int = 8
    seq: int = 16
    overrides: tuple[tuple[str, Any], ...] = ()

    def build(self) -> nn.Module:
        """Call the model's constructor: random weights from the default generator, float64, in training mode."""
        transformers = importlib.import_module("transformers")
        config_name, model_name, shape = _FAMILIES[self.family]
        drops = ("attn_pdrop", "resid_pdrop", "embd_pdrop") if self.family == "gpt2" else ("attention_dropout",)
        layers = {"n_layer" if self.family == "gpt2" else "num_hidden_layers": self.layers}
        config = getattr(transformers, config_name)(
            **{**shape, **layers, **dict.fromkeys(drops, self.dropout), **dict(self.overrides)},
            vocab_size=100,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._experts_implementation = "eager"  # the grouped kernels do not take float64
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model: torch.nn.Module = getattr(transformers, model_name)(config)
            return model.train()
        finally:
            torch.set_default_dtype(default)

    def global_batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return ids `(batch, seq)` and the same as labels; they depend on the step alone."""
        ids = torch.randint(100, (self.batch, self.seq), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids}


_adamw = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def train_on_one(training: Training, *, seed: int = 0) -> TrainingRecord:
    """Train as a user of plain PyTorch does, on one process, without veScale."""
    losses, norms = [], []
    with keep_float64():
        torch.manual_seed(seed)
        model = training.build()
        optimizer = _adamw(model.parameters())
        for step in range(training.steps):
            loss = model(**training.global_batch(step)).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return TrainingRecord.collect(model, optimizer, losses=losses, grad_norms=norms)


def train_in_parallel(
    training: Training,
    plan: Any,
    *,
    seed: int = 0,
    deferred: bool = True,
    save: str = "",
    load: str = "",
    stop: int | None = None,
) -> TrainingRecord:
    """Train the same through `vescale.parallelize`; called in every rank.

    Args:
        training: What to train.
        plan: A `vescale.Plan` for as many processes as there are.
        seed: Seed of initialization and dropout.
        deferred: Build without storage; False builds the full model on every rank first.
        save: Folder for a checkpoint after the last step, or empty.
        load: Checkpoint to start from, or empty.
        stop: Step before which to stop; by default `training.steps`.
    """
    import vescale

    losses, norms = [], []
    with keep_float64():
        torch.manual_seed(seed)
        model = vescale.deferred_init(training.build) if deferred else training.build()
        model, optimizer = vescale.parallelize(plan, model, _adamw, clip_grad_norm=1.0)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "step": 0}
        if load:
            vescale.load(load, state)
            torch.set_rng_state(state["rng"])
        for step in range(state["step"], training.steps if stop is None else stop):
            loss = model(**model.local_batch(training.global_batch(step))).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(model.global_loss(loss))
            norms.append(optimizer.grad_norm)
            state["step"] = step + 1
        if save:
            vescale.save(save, {**state, "rng": torch.get_rng_state()})
    with model.unsharded():
        return TrainingRecord.collect(model.module, optimizer, losses=losses, grad_norms=norms)
