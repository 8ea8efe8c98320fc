"""Launch files are right: shells parse them, Kubernetes' structure fits, and torchrun starts the ranks."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

import vescale
from vescale.__main__ import main

PLAN = vescale.Plan(dp=8, tp=2, pp=2, zero=1, num_microbatches=2, device="cuda")


def check_shell(text, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)
    if (linter := shutil.which("shellcheck")) is not None:
        subprocess.run([linter, path], check=True)


def options_of(text):
    """Return the options of the torchrun command, and what it runs."""
    (command,) = [line for line in text.splitlines() if "torchrun --" in line]
    words = shlex.split(command)
    words = words[words.index("torchrun") + 1 :]
    found = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    return found, [word for word in words if not word.startswith("--")]


@pytest.mark.parametrize("hosts", [1, 2, 4, 32])
@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_shell_scripts_start_all_processes(to, hosts, tmp_path):
    text = vescale.launch_file(PLAN, "train it.py", to=to, hosts=hosts, arguments=["a b", "$HOME"])
    check_shell(text, tmp_path)
    options, command = options_of(text)
    assert int(options["nproc-per-node"]) * hosts == PLAN.world_size
    assert command == ["train it.py", "a b", "$HOME"]
    assert ("standalone" in options) == (hosts == 1)
    if hosts > 1:
        assert int(options["nnodes"]) == hosts
        assert options["rdzv-endpoint"].endswith(":29500")


def test_slurm_gets_one_task_and_all_gpus_of_each_node():
    text = vescale.launch_file(PLAN, "train.py", to="slurm", hosts=4, name="long-run")
    found = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, flags=re.MULTILINE))
    assert found == {
        "job-name": "long-run",
        "nodes": "4",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "output": "%x-%j.out",
    }
    assert text.index("#SBATCH") < text.index("set -euo")  # Slurm stops reading at the first command
    assert "gpus-per-node" not in vescale.launch_file(vescale.Plan(dp=4), "train.py", to="slurm", hosts=2)


def test_the_slurm_script_meets_at_the_first_node(tmp_path):
    """Run the script with stand-ins for Slurm's commands, and see what torchrun gets."""
    for name, body in {
        "scontrol": "echo node7; echo node8",
        "srun": 'exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(vescale.launch_file(PLAN, "train.py", to="slurm", hosts=2, arguments=["--lr", "1e-3"]))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[7-8]"}
    words = subprocess.run(["bash", script], env=env, check=True, capture_output=True, text=True).stdout.split("\n")
    assert words[:-1] == [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=12",
        "--rdzv-endpoint=node7:29500",
        "--nproc-per-node=16",
        "train.py",
        "--lr",
        "1e-3",
    ]


def test_the_torchrun_script_asks_for_the_first_host(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(vescale.launch_file(PLAN, "train.py", to="torchrun", hosts=2))
    env = {name: value for name, value in os.environ.items() if name != "HEAD_HOST"}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "expected the name of the first host in HEAD_HOST" in done.stderr


# name -> type, or the fields inside: what Kubernetes' API demands of these objects, and what a run needs
OBJECT = {"apiVersion": str, "kind": str, "metadata": {"name": str}}
SERVICE = OBJECT | {"spec": {"clusterIP": str, "selector": dict, "ports": [{"name": str, "port": int}]}}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "ports": [{"containerPort": int}],
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {"restartPolicy": str, "volumes": [{"name": str, "emptyDir": dict}], "containers": [CONTAINER]}
JOB = OBJECT | {
    "spec": {
        "completionMode": str,
        "completions": int,
        "parallelism": int,
        "backoffLimit": int,
        "template": {"metadata": {"labels": dict}, "spec": POD},
    }
}


def check_fields(value, expected, where):
    if isinstance(expected, dict):
        missing = [name for name in expected if name not in value]
        assert missing == [], where
        for name, inner in expected.items():
            check_fields(value[name], inner, f"{where}.{name}")
    elif isinstance(expected, list):
        assert value, where
        for each in value:
            check_fields(each, expected[0], f"{where}[]")
    else:
        assert type(value) is expected, where


def manifest(**options):
    text = vescale.launch_file(PLAN, "train.py", to="kubernetes", image="registry/train:1", **options)
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("hosts", [2, 4])
def test_the_manifest_has_what_kubernetes_demands(hosts, tmp_path):
    service, job = manifest(hosts=hosts, name="long-run", arguments=["it's", "--lr=1e-3"])
    check_fields(service, SERVICE, "service")
    check_fields(job, JOB, "job")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert service["spec"]["clusterIP"] == "None"  # headless: Kubernetes wants this text, not null
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == hosts
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 32 // hosts}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    bash, flag, command = container["command"]
    assert (bash, flag) == ("bash", "-c")
    check_shell(f"#!/usr/bin/env bash\n{command}\n", tmp_path)
    options, words = options_of(command)
    assert options["master-addr"] == "long-run-0.long-run"
    assert options["node-rank"] == "$JOB_COMPLETION_INDEX"
    assert int(options["nproc-per-node"]) * hosts == PLAN.world_size
    assert words == ["train.py", "it's"]


def test_a_job_of_one_host_needs_no_service():
    (job,) = manifest()
    check_fields(job, JOB, "job")
    assert "subdomain" not in job["spec"]["template"]["spec"]


def test_a_manifest_that_lacks_a_field_is_found():
    _, job = manifest(hosts=2)
    del job["spec"]["template"]["spec"]["restartPolicy"]
    with pytest.raises(AssertionError, match=r"job\.spec\.template\.spec"):
        check_fields(job, JOB, "job")


SCRIPT = """
import sys, torch.distributed as dist
dist.init_process_group("gloo")
open(f"{sys.argv[1]} {dist.get_rank()}", "w").write(str(dist.get_world_size()))
dist.barrier()  # a rank that ends at once closes connections that another is about to make
dist.destroy_process_group()
"""


def test_the_torchrun_script_runs(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.sh").write_text(
        vescale.launch_file(vescale.Plan(dp=2), "train.py", to="torchrun", arguments=["the rank"])
    )
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "run.sh"], cwd=tmp_path, env=env, check=True, timeout=120)
    assert {path.name: path.read_text() for path in tmp_path.glob("the rank *")} == {
        "the rank 0": "2",
        "the rank 1": "2",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "slurm", "hosts": 3}, r"expected hosts that divide the plan's 32 processes, got hosts = 3; use 1, 2, "),
        ({"to": "slurm", "hosts": 64}, r"divide the plan's 32 processes, got hosts = 64; use .* 16 or 32$"),
        ({"to": "slurm", "script": ""}, r"expected the path of a training script, got ''"),
        ({"to": "slurm", "name": "My Run"}, r"small letters, digits and hyphens .*, got 'My Run'"),
        ({"to": "slurm", "name": "a" * 51}, r"at most 50 small letters"),
        ({"to": "kubernetes"}, r"expected the container's image for Kubernetes, got None"),
        ({"to": "slurm", "image": "i"}, r"expected no image for slurm, got 'i'"),
        ({"to": "k8s"}, r"expected 'torchrun', 'slurm' or 'kubernetes' for to, got 'k8s'"),
        ({"to": "slurm", "port": 70000}, r"expected a port from 1 to 65535 for port, got 70000"),
    ],
)
def test_what_cannot_be_started_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vescale.launch_file(PLAN, **({"script": "train.py"} | options))


def test_the_command_writes_the_same(tmp_path, capsys):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    command = ["launch", str(path), "train.py", "--to", "slurm", "--hosts", "4", "--", "--lr", "1e-3"]
    assert main(command) == 0
    assert capsys.readouterr().out == vescale.launch_file(
        PLAN, "train.py", to="slurm", hosts=4, arguments=["--lr", "1e-3"]
    )
    assert main(["launch", str(path), "train.py", "--to", "slurm", "--hosts", "5"]) == 2
    assert "vescale: launch_file: expected hosts that divide" in capsys.readouterr().err


def test_the_command_explains_a_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert main(["explain", str(path), "--devices-per-host", "8"]) == 0
    assert capsys.readouterr().out == PLAN.explain(devices_per_host=8) + "\n"
    assert main(["explain", str(path), "--html", str(tmp_path / "plan.html")]) == 0
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == PLAN.to_html()
    assert main(["explain", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
