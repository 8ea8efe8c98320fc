"""Write what starts a training run: a shell script for torchrun, a batch script for Slurm, a manifest for Kubernetes.

Each text starts ``world_size / hosts`` processes on each of ``hosts`` hosts, so that ranks of one host have neighboring
numbers, as a plan's mesh expects. They meet at one host by torch's rendezvous:

    torchrun      the first host, in the variable HEAD_HOST of each host's shell
    slurm         the first host of the allocation
    kubernetes    the pod with index 0, by the name that a headless service gives it

The texts are plain data: nothing is started and nothing is read here.
"""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from vescale.dtensor.extension import Condition, Count, checked, one_of
from vescale.plan import Plan

TARGETS = ("torchrun", "slurm", "kubernetes")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 50  # a name of a pod has at most 63 characters, among them its index

Target = Annotated[str, one_of(*TARGETS)]
Port = Annotated[int, Condition("a port from 1 to 65535", lambda value: 1 <= value <= 65535)]


@dataclass(frozen=True)
class Job:
    """A run on several hosts.

    Attributes:
        plan: of the run.
        command: the script and its arguments.
        hosts: number of hosts.
        name: of the job.
        port: of the rendezvous.
        image: of the container, for Kubernetes.
    """

    plan: Plan
    command: tuple[str, ...]
    hosts: int
    name: str
    port: int
    image: str | None

    @property
    def per_host(self) -> int:
        """Processes, and devices, of a host."""
        return self.plan.world_size // self.hosts

    @property
    def heading(self) -> str:
        """The plan in a line."""
        return f"{str(self.plan).splitlines()[0]}, on {self.hosts} {'host' if self.hosts == 1 else 'hosts'}"

    @property
    def quoted(self) -> str:
        """The command for a shell."""
        return shlex.join(self.command)


@checked
def launch_file(
    plan: Plan,
    script: str,
    *,
    to: Target,
    hosts: Count = 1,
    arguments: Sequence[str] = (),
    name: str = "train",
    port: Port = 29500,
    image: str | None = None,
) -> str:
    """Return the text of a file that starts a training script under a plan.

    Args:
        plan: says how many processes there are, and on which devices.
        script: the program, as each host names it.
        to: ``"torchrun"``: a shell script to run on every host, with the first host's name in ``HEAD_HOST`` if there
            are several; ``"slurm"``: a script for ``sbatch``; ``"kubernetes"``: a headless service and an indexed job
            for ``kubectl apply``.
        hosts: number of hosts; it divides the plan's processes.
        arguments: of the script.
        name: of the job: small letters, digits and hyphens, at most 50.
        port: of the rendezvous, free on the first host.
        image: container image with torch, veScale and the script; for Kubernetes alone.

    Raises:
        ValueError: ``hosts`` does not divide the processes, the script is empty, the name is none that Kubernetes and
            Slurm take, or an image is missing or of no use.

    Example:
        >>> print(launch_file(Plan(dp=4), "train.py", to="torchrun").splitlines()[-1])
        exec torchrun --standalone --nproc-per-node=4 train.py
    """
    if plan.world_size % hosts:
        raise ValueError(
            f"launch_file: expected hosts that divide the plan's {plan.world_size} processes, got hosts = {hosts}; use "
            f"{_divisors(plan.world_size)}"
        )
    if not script:
        raise ValueError("launch_file: expected the path of a training script, got ''; pass 'train.py', for example")
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise ValueError(
            f"launch_file: expected a name of at most {_MAX_NAME} small letters, digits and hyphens that begins with a "
            f"letter, got {name!r}; pass name='train', for example"
        )
    if (to == "kubernetes") != bool(image) or image == "":
        expected = "the container's image for Kubernetes" if to == "kubernetes" else f"no image for {to}"
        raise ValueError(f"launch_file: expected {expected}, got {image!r}; pass image=... for Kubernetes alone")
    return _WRITERS[to](Job(plan, (script, *arguments), hosts, name, port, image))


def _divisors(number: int) -> str:
    found = [str(each) for each in range(1, min(number, 4096) + 1) if number % each == 0]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]


def _torchrun(job: Job, rendezvous: str) -> str:
    """Return the command of one host."""
    where = "--standalone" if job.hosts == 1 else f"--nnodes={job.hosts} {rendezvous}"
    return f"torchrun {where} --nproc-per-node={job.per_host} {job.quoted}"


def _shell(job: Job) -> str:
    lines = ["#!/usr/bin/env bash", f"# {job.heading}"]
    if job.hosts > 1:
        lines.append("# Run this on each host, with HEAD_HOST=<name of the first one>.")
    lines.append("set -euo pipefail")
    if job.hosts > 1:
        lines.append(': "${HEAD_HOST:?expected the name of the first host in HEAD_HOST}"')
    endpoint = f'--rdzv-backend=c10d --rdzv-id={job.name} --rdzv-endpoint="$HEAD_HOST:{job.port}"'
    return "\n".join([*lines, f"exec {_torchrun(job, endpoint)}"]) + "\n"


def _slurm(job: Job) -> str:
    options = [f"--job-name={job.name}", f"--nodes={job.hosts}", "--ntasks-per-node=1", "--output=%x-%j.out"]
    if job.plan.device == "cuda":
        options.append(f"--gpus-per-node={job.per_host}")
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), f"# {job.heading}"]
    lines.append("set -euo pipefail")
    if job.hosts > 1:
        lines += ['mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")', 'head_host="${nodes[0]}"']
    endpoint = f'--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head_host:{job.port}"'
    return "\n".join([*lines, f"srun {_torchrun(job, endpoint)}"]) + "\n"


def _kubernetes(job: Job) -> str:
    """Return the manifest; pods of an indexed job are named ``NAME-0``, ``NAME-1``, … within the service's domain."""
    rendezvous = f'--node-rank="$JOB_COMPLETION_INDEX" --master-addr={job.name}-0.{job.name} --master-port={job.port}'
    command = ["bash", "-c", f"exec {_torchrun(job, rendezvous)}"]
    lines = [f"# {job.heading}"]
    if job.hosts > 1:
        lines += _SERVICE.format(name=job.name, port=job.port).splitlines()
    values = {"image": json.dumps(job.image), "command": json.dumps(command)}
    lines += _JOB.format(name=job.name, hosts=job.hosts, port=job.port, **values).splitlines()
    if job.hosts == 1:
        lines.remove(_SUBDOMAIN.format(name=job.name))
    if job.plan.device == "cuda":
        lines += _GPUS.format(per_host=job.per_host).splitlines()
    return "\n".join(lines) + "\n"


_SERVICE = """\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None  # a name for each pod, and no balancing
  publishNotReadyAddresses: true  # pods find each other before they are ready
  selector:
    app: {name}
  ports:
    - name: rendezvous
      port: {port}
---"""

_SUBDOMAIN = "      subdomain: {name}"

_JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {hosts}
  parallelism: {hosts}
  backoffLimit: 0  # a lost pod ends the job: start it again from the last checkpoint
  template:
    metadata:
      labels:
        app: {name}
    spec:
      subdomain: {name}
      restartPolicy: Never
      volumes:
        - name: shared-memory
          emptyDir:
            medium: Memory
      containers:
        - name: train
          image: {image}
          command: {command}
          ports:
            - containerPort: {port}
          volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm"""

_GPUS = """\
          resources:
            limits:
              nvidia.com/gpu: {per_host}"""

_WRITERS: dict[str, Callable[[Job], str]] = {"torchrun": _shell, "slurm": _slurm, "kubernetes": _kubernetes}
