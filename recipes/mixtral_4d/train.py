"""Train an unmodified Hugging Face Mixtral in data x tensor x pipeline x ZeRO parallelism, and show it is one training.

    python recipes/mixtral_4d/train.py                                         # starts torchrun with dp*tp*pp processes
    torchrun --nproc-per-node 8 recipes/mixtral_4d/train.py --dp 2 --tp 2 --pp 2 --zero 1

Three trainings from the same seed on the same batches:

    reference   one process, plain PyTorch                      step 0 ................. end
    4d          all processes                                   step 0 ....|............ end
    resumed     the 4d checkpoint under another layout               middle |............ end

The last line says whether the losses of all three agree within the stated bound.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from config import RECIPE, Config, ConfigError, Layout, check_world, model_config, parse, resumed_layout
from data import global_batch, load_tokens
from report import Report, Step
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import MixtralForCausalLM

import vescale

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> int:
    """Run the recipe; return the exit status: 0 for PASS, 1 for FAIL, 2 for a run that could not start."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = parse(argv)
        load_tokens(config)
        if config.dry_run:
            from dry_run import print_dry_run

            print_dry_run(config)
            return 0
        if "RANK" not in os.environ:
            return launch(config, argv)
        check_world(config)
        join(config)
        return run(config)
    except (ValueError, NotImplementedError) as error:  # what every rank finds out alike
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{RECIPE}: error: {error}", file=sys.stderr, flush=True)
        return 2


def launch(config: Config, argv: list[str]) -> int:
    """Start this file under torchrun, one process per rank."""
    rendezvous = ["--standalone"]
    if config.port is not None:
        check_port(config.port)
        rendezvous = ["--master-port", str(config.port)]
    processes = ["--nproc-per-node", str(config.layout.world_size)]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *processes, __file__, *argv]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode


def check_port(port: int) -> None:
    """Refuse a port that another program listens on.

    Raises:
        ConfigError: naming the port.
    """
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"--port: expected a free port, got {port} ({error.strerror}); choose another, or leave --port out"
            ) from error


def join(config: Config) -> None:
    """Join the process group that torchrun describes."""
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[config.device]
    try:
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    except dist.DistNetworkError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(f"expected the other processes at {address}, got {error}; choose another --port") from error


def run(config: Config) -> int:
    """Train the reference, the 4D run and the resumed run, and compare."""
    with same_precision(config):
        tokens, vocab_size = load_tokens(config)
        report = Report(config, vocab_size, printing=dist.get_rank() == 0)
        if config.reference:
            report.reference(run_reference(config))
        middle = config.steps // 2
        layouts = {"4d": config.layout, "resumed": resumed_layout(config)}
        for name, layout in layouts.items():
            report.start(name, layout)
            source = checkpoint(config) if name == "resumed" else config.resume
            last = train(config, layout, tokens, vocab_size, source, report, save_at=middle if name == "4d" else None)
            if config.reference:
                report.parameters(name, *parameter_difference(last, Path(config.out) / "reference.safetensors"))
            del last
            gc.collect()
    status = share(report.finish() if dist.get_rank() == 0 else None)
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads may still need the GIL, which they cannot take during the interpreter's shutdown
    return status


def train(
    config: Config,
    layout: Layout,
    tokens: torch.Tensor,
    vocab_size: int,
    source: str | None,
    report: Report,
    *,
    save_at: int | None,
) -> dict[str, torch.Tensor]:
    """Train under ``layout`` from ``source`` (or from step 0) to the end and return the parameters of this rank."""
    plan = vescale.Plan(
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        zero=layout.zero,
        sequence_parallel=config.sequence_parallel and layout.tp > 1,
        schedule=config.schedule,
        num_microbatches=config.microbatches_for(layout),
        device=config.device,
    )
    torch.manual_seed(config.seed)
    torch.set_default_dtype(config.torch_dtype)
    model = vescale.deferred_init(MixtralForCausalLM, model_config(config, vocab_size)).train()
    adamw = functools.partial(torch.optim.AdamW, lr=config.lr)
    model, optimizer = vescale.parallelize(plan, model, adamw, clip_grad_norm=1.0)

    state = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "step": 0}
    if source is not None:
        vescale.load(source, state)
        torch.set_rng_state(state["rng"])
    for step in range(state["step"], config.steps):
        if step == save_at:
            vescale.save(checkpoint(config), {**state, "rng": torch.get_rng_state(), "step": step}, overwrite=True)
        start = time.perf_counter()
        batch = model.local_batch(global_batch(tokens, config, step))
        loss = model(**{name: value.to(config.device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss, norm = model.global_loss(loss).item(), optimizer.grad_norm.item()
        report.step(Step(step, mean_loss, norm, time.perf_counter() - start, peak_memory(config)))
    return model.state_dict()


@contextlib.contextmanager
def same_precision(config: Config) -> Iterator[None]:
    """In float64, turn the model's own casts to float32 into float64, as the reference process does."""
    if config.dtype != "float64":
        yield
        return
    try:
        from vescale_testing import keep_float64
    except ModuleNotFoundError:
        raise ConfigError("--float64: expected the package vescale-testing, got none; pip install ./testing") from None
    with keep_float64():
        yield


def checkpoint(config: Config) -> str:
    """Return the folder of the checkpoint that the stopped run leaves."""
    return str(Path(config.out) / "checkpoint")


def run_reference(config: Config) -> list[dict]:
    """Train the reference on rank 0 in a process of its own, and give its rows to every rank.

    Raises:
        ConfigError: the reference process failed; its own output says why.
    """
    rows = None
    if dist.get_rank() == 0:
        out = Path(config.out)
        (out / "config.json").write_text(config.to_json())
        command = [sys.executable, str(HERE / "reference.py"), str(out / "config.json"), str(out)]
        if subprocess.run(command, check=False).returncode == 0:
            rows = [json.loads(line) for line in (out / "reference.jsonl").read_text().splitlines()]
    rows = share(rows)
    if rows is None:
        raise ConfigError("expected numbers of the single-process reference, got its failure; read its output above")
    return rows


def parameter_difference(parameters: dict[str, torch.Tensor], reference: Path) -> tuple[float, str]:
    """Return the largest relative difference of a parameter, ``max|a - b| / max|b|``, over all ranks, and its name."""
    worst = (0.0, "")
    with safe_open(reference, framework="pt") as file:
        for name, value in parameters.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            expected = file.get_tensor(name)
            difference = (full.cpu() - expected).abs().max() / expected.abs().max()
            worst = max(worst, (difference.item(), name))
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, worst)
    return max(everywhere)


def peak_memory(config: Config) -> float:
    """Return the largest peak memory of any rank in MiB: allocated on the GPU, resident on the CPU."""
    if config.device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    largest = torch.tensor(peak, device=config.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def share(value: object) -> object:
    """Return rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


if __name__ == "__main__":
    sys.exit(main())
