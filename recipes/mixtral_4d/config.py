"""What a run is: command line, model configuration, layouts; and everything that can be wrong with them.

Nothing here starts a process or imports veScale, so that the single-process reference reads the same configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import MixtralConfig

RECIPE = "mixtral_4d"

# Shapes of the presets: `tiny` trains in seconds on a laptop, `8x7b` is the published model.
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "8x7b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
}

# Largest accepted relative difference of the loss. The two programs do the same arithmetic in another order of
# additions: a sum over tensor-parallel ranks, the mean over data-parallel ranks and micro-batches. One such rounding is
# 6e-8 in float32 (1e-16 in float64, 4e-3 in bfloat16). AdamW divides by the root of the second moment, which lifts the
# rounding of small gradients to the size of a step, and a token that sits between two experts may change sides; so the
# bound leaves room for some hundred roundings. (In tests/dp_tp stock dropout masks change the first loss, in float64.)
BOUNDS = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 5e-3}


class ConfigError(ValueError):
    """A run that cannot start; the message says what to change."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism: ``dp * tp * pp`` processes, and the ZeRO stage over ``dp``."""

    dp: int
    tp: int
    pp: int
    zero: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"dp {self.dp} x tp {self.tp} x pp {self.pp}, ZeRO-{self.zero}"


@dataclass(frozen=True)
class Config:
    """One run of the recipe, as the command line gives it."""

    preset: str = "tiny"
    dp: int = 2
    tp: int = 2
    pp: int = 2
    zero: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    microbatches: int | None = None
    steps: int = 30
    batch: int = 16
    seq: int = 128
    lr: float = 2e-3
    dropout: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    data: str | None = None
    tokenizer: str | None = None
    out: str = "runs/mixtral_4d"
    resume: str | None = None
    resume_layout: str | None = None
    reference: bool = True
    dry_run: bool = False
    port: int | None = None

    @property
    def layout(self) -> Layout:
        """The layout that the run starts with."""
        return Layout(self.dp, self.tp, self.pp, self.zero)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Parameter and compute dtype."""
        return getattr(torch, self.dtype)

    @property
    def bound(self) -> float:
        """Largest accepted relative difference of the loss, see ``BOUNDS``."""
        return BOUNDS[self.dtype]

    def microbatches_for(self, layout: Layout) -> int:
        """Pieces of a rank's batch: as given, else up to four for a pipeline and one without."""
        if self.microbatches is not None:
            return self.microbatches
        local = self.batch // layout.dp
        return max(m for m in (1, 2, 4) if local % m == 0) if layout.pp > 1 else 1

    def to_json(self) -> str:
        """Return the configuration as JSON, for the reference process and for the record."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Read :meth:`to_json`'s text."""
        return cls(**json.loads(text))


def model_config(config: Config, vocab_size: int) -> MixtralConfig:
    """Return the Hugging Face configuration of the run. Grouped-matmul experts do not take float64."""
    hf = MixtralConfig(
        **PRESETS[config.preset],
        vocab_size=vocab_size,
        max_position_embeddings=max(config.seq, 128),
        attention_dropout=config.dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    hf._attn_implementation = "sdpa"
    if config.dtype == "float64":
        hf._experts_implementation = "eager"
    return hf


def parse(argv: list[str] | None = None) -> Config:
    """Read the command line.

    Raises:
        ConfigError: see :func:`check`.
    """
    parser = argparse.ArgumentParser(
        prog=RECIPE, description="Train an unmodified Mixtral in 4D and show it is one training."
    )
    default = Config()
    add = parser.add_argument
    add("--preset", choices=PRESETS, default=default.preset, help="model shape")
    add("--dp", type=int, default=default.dp, help="data-parallel degree")
    add("--tp", type=int, default=default.tp, help="tensor-parallel degree; experts are spread over it too")
    add("--pp", type=int, default=default.pp, help="pipeline stages")
    add("--zero", type=int, choices=(0, 1, 2), default=default.zero, help="ZeRO stage over dp")
    add("--sequence-parallel", action="store_true", help="shard activations between layers over the sequence")
    add("--schedule", choices=("1f1b", "gpipe"), default=default.schedule, help="pipeline schedule")
    add(
        "--microbatches",
        type=int,
        default=None,
        help="pieces of a rank's batch (default: up to 4 with a pipeline, else 1)",
    )
    add("--steps", type=int, default=default.steps, help="optimizer steps")
    add("--batch", type=int, default=default.batch, help="sequences in the global batch")
    add("--seq", type=int, default=default.seq, help="tokens in a sequence")
    add("--lr", type=float, default=default.lr, help="AdamW's learning rate")
    add("--dropout", type=float, default=default.dropout, help="attention dropout")
    add("--seed", type=int, default=default.seed, help="seed of initialization, dropout and batch order")
    add("--dtype", choices=BOUNDS, default=default.dtype, help="parameter and compute dtype")
    add("--float64", action="store_const", const="float64", dest="dtype", help="short for --dtype float64; bound 1e-10")
    add("--device", choices=("cpu", "cuda"), default=default.device, help="cuda uses NCCL")
    add(
        "--data",
        default=None,
        metavar="FILE",
        help="text to train on (default: the topics that CPython's help() shows)",
    )
    add("--tokenizer", default=None, metavar="DIR", help="local Hugging Face tokenizer (default: one token per byte)")
    add("--out", default=default.out, metavar="DIR", help="where metrics, picture and checkpoint go")
    add("--resume", default=None, metavar="DIR", help="start from this checkpoint instead of from step 0")
    add("--resume-layout", default=None, metavar="dp=4,tp=2,pp=1", help="layout that the stopped run continues under")
    add("--no-reference", dest="reference", action="store_false", help="do not train the single-process reference")
    add("--dry-run", action="store_true", help="print mesh, placements, bytes per rank and schedule, then stop")
    add("--port", type=int, default=None, help="rendezvous port on this machine (default: a free one)")
    config = Config(**vars(parser.parse_args(argv)))
    if config.preset != "tiny":  # no single process holds it
        config = dataclasses.replace(config, reference=False)
    check(config)
    return config


def check(config: Config) -> None:
    """Refuse what cannot run, before any process group exists.

    Raises:
        ConfigError: one message that names the option, its value and the way out.
    """
    for name in ("dp", "tp", "pp", "steps", "batch", "seq"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {getattr(config, name)}")
    if not 0.0 <= config.dropout < 1.0:
        raise ConfigError(f"--dropout: expected at least 0 and below 1, got {config.dropout}")
    check_layout(config, config.layout)
    if config.steps < 2 and not config.dry_run:
        raise ConfigError(f"--steps: expected at least 2, because the run stops in the middle, got {config.steps}")
    if config.data is not None and not Path(config.data).is_file():
        raise ConfigError(f"--data: expected a text file, got {config.data}; leave --data out for the default text")
    if config.tokenizer is not None and not Path(config.tokenizer).is_dir():
        raise ConfigError(f"--tokenizer: expected the folder of a Hugging Face tokenizer, got {config.tokenizer}")
    if config.resume is not None and not Path(config.resume).is_dir():
        raise ConfigError(f"--resume: expected a folder such as runs/mixtral_4d/checkpoint, got {config.resume}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected a CUDA device for cuda, got none; use --device cpu")
    resumed_layout(config)
    if not config.dry_run:
        check_writable(Path(config.out))


def check_layout(config: Config, layout: Layout) -> None:
    """Refuse degrees that do not divide the model or the batch.

    Raises:
        ConfigError: naming the degree and what it does not divide.
    """
    shape = PRESETS[config.preset]
    for key in ("num_attention_heads", "num_key_value_heads", "num_local_experts"):
        if shape[key] % layout.tp:
            raise ConfigError(f"--tp: expected a divisor of {key} = {shape[key]}, got {layout.tp}")
    if layout.pp > shape["num_hidden_layers"]:
        raise ConfigError(
            f"--pp: expected at most one stage per layer, of which there are {shape['num_hidden_layers']}, got "
            f"{layout.pp}"
        )
    if config.batch % layout.dp:
        raise ConfigError(f"--batch: expected a multiple of --dp {layout.dp}, got {config.batch}")
    pieces = config.microbatches_for(layout)
    if pieces < 1 or (config.batch // layout.dp) % pieces:
        raise ConfigError(
            f"--microbatches: expected a divisor of the {config.batch // layout.dp} sequences of a rank, got {pieces}; "
            "use a divisor, or another --batch"
        )


def resumed_layout(config: Config) -> Layout:
    """Return the layout under which the stopped run continues: as given, or another one on as many processes.

    Raises:
        ConfigError: a layout that cannot be read, does not fit the model, or needs another number of processes.
    """
    if config.resume_layout is None:
        return _other_layout(config)
    degrees = {"dp": 1, "tp": 1, "pp": 1}
    for part in config.resume_layout.split(","):
        name, _, value = part.strip().partition("=")
        if name not in degrees or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"--resume-layout: expected degrees such as dp=4,tp=2,pp=1, got {part!r}")
        degrees[name] = int(value)
    layout = Layout(**degrees, zero=config.zero)
    if layout.world_size != config.layout.world_size:
        raise ConfigError(
            f"--resume-layout: expected degrees with the product dp * tp * pp = {config.dp} * {config.tp} * "
            f"{config.pp} = {config.layout.world_size}, got {config.resume_layout} with {layout.world_size}"
        )
    check_layout(config, layout)
    return layout


def _other_layout(config: Config) -> Layout:
    """Return the first different layout that fits: stages folded into dp, then tensor ranks, then the rest."""
    start, world = config.layout, config.layout.world_size
    candidates = [(start.dp * start.pp, start.tp, 1), (start.dp * start.tp, 1, start.pp)]
    candidates += [(world // (tp * pp), tp, pp) for tp in (2, 4, 1) for pp in (1, 2, 4) if world % (tp * pp) == 0]
    for degrees in candidates:
        layout = Layout(*degrees, zero=config.zero)
        if layout == start:
            continue
        try:
            check_layout(config, layout)
        except ConfigError:
            continue
        return layout
    return start


def check_writable(folder: Path) -> None:
    """Create ``folder`` and prove that a file can be written in it.

    Raises:
        ConfigError: naming the folder and the system's reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out: expected a writable folder, got {folder} ({error.strerror}); choose another"
        ) from error


def check_world(config: Config) -> None:
    """Refuse a number of processes that is not ``dp * tp * pp``.

    Raises:
        ConfigError: naming the world size and the degrees.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.layout.world_size:
        raise ConfigError(
            f"expected dp * tp * pp = {config.dp} * {config.tp} * {config.pp} = {config.layout.world_size} processes, "
            f"got {world}; start {config.layout.world_size}, or change the degrees"
        )
