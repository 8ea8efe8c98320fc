"""Clipping over several mesh axes takes one collective, whose result all ranks receive, and counts elements once."""

import contextlib
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor.extension import group_of_ranks
from vescale.optim import DDP, clip_grad_norm_
from vescale.optim.clip import distribution_axes
from vescale_testing import ranks, run_ranks

SHAPES = {"a": (6, 4), "b": (4,), "c": (), "d": (2, 8), "e": (7,), "f": (4, 4)}

#: How a parameter is cut over tp; None is a plain tensor.
OVER_TP = {"a": Shard(0), "b": Replicate(), "c": None, "d": Shard(1), "e": None, "f": Replicate()}


def gradient(name):
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def whole_norm(names, norm_type=2.0):
    """Return torch's norm of all gradients on one device."""
    return torch.nn.utils.get_total_norm([gradient(name) for name in names], norm_type)


def cut(tensor, mesh, placements):
    """Return this rank's part, by its coordinates, whatever the order of the ranks, as a DTensor."""
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            tensor = tensor.chunk(mesh.size(dim), placement.dim)[mesh.get_coordinate()[dim]]
    return DTensor.from_local(tensor.contiguous(), mesh, placements, run_check=False)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Stage(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, names, tp=None):
        super().__init__()
        for name in names:
            value = torch.zeros(SHAPES[name], dtype=torch.float64)
            placement = OVER_TP[name] if tp is not None else None
            self.register_parameter(name, nn.Parameter(cut(value, tp, [placement]) if placement else value))

    def forward(self, grads):
        return sum((local(p) * local(grads[name])).sum() for name, p in self.named_parameters())


def backward(model, names, tp=None, scale=1.0):
    """Let the gradients of all ranks of data parallelism have the mean `gradient`."""
    placements = {name: OVER_TP[name] if tp is not None else None for name in names}
    grads = {n: cut(gradient(n), tp, [p]) if p else gradient(n) for n, p in placements.items()}
    model.zero_grad()
    if names:
        (model(grads) * scale).backward()


@contextlib.contextmanager
def host_waits_for_nothing():
    """Let everything raise that makes the host wait for an accelerator."""
    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"):
            error = AssertionError(f"the host waits in {name}")
            stack.enter_context(mock.patch.object(torch.Tensor, name, side_effect=error))
        yield


def measure(target, **kwargs):
    """Return the norm, and the number of collectives that a further call takes."""
    norm = clip_grad_norm_(target, math.inf, **kwargs)
    with CommDebugMode() as comm, host_waits_for_nothing():
        again = clip_grad_norm_(target, math.inf, **kwargs)
    assert again.item() == norm.item()
    return norm.item(), comm.get_total_counts()


def check(found, names, collectives=1, norm_type=2.0):
    """All ranks have the same bits, those of one device up to the order of additions."""
    norms, counts = zip(*found, strict=True)
    assert set(counts) == {collectives}
    assert len(set(norms)) == 1
    torch.testing.assert_close(norms[0], whole_norm(names, norm_type).item(), rtol=1e-12, atol=0)


def on_three_axes(mesh, variants):
    """Return the norms of pipeline stages whose parameters are cut over tp and by ZeRO, for each variant."""
    stage, coord = (mesh[name].get_coordinate()[0] for name in ("pp", "dp"))
    names = ["abc", "def"][stage]
    found = []
    for zero, reduction, norm_type in variants:
        settings = {"zero": zero, "reduction": reduction, "bucket_bytes": 100, "per_rank": True}
        model = DDP(Stage(names, mesh["tp"]), mesh["dp"], **settings)
        backward(model, names, mesh["tp"], scale=[0.5, 1.5][coord])
        found.append(measure(model, norm_type=norm_type, norm_axes=[mesh["pp"]]))
        params = [p for p in model.parameters() if p.requires_grad]
        assert [axis.size for axis in distribution_axes(params, model, [mesh["pp"]])] == [8]  # of the loss scaler, too
    return found


def test_one_collective_over_three_axes():
    """Also where ranks do not ascend along the axes, or anywhere."""
    every = [(zero, "backend", 2.0) for zero in range(4)]
    every += [(1, "backend", 1.0), (0, "backend", math.inf), (2, "ordered", 2.0), (0, "ordered", 1.0)]
    some = [every[0], every[3], every[6]]

    def body():
        usual = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        turned = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("tp", "pp", "dp"))
        numbers = [[[5, 2], [7, 4]], [[1, 0], [3, 6]]]
        mixed = DeviceMesh("cpu", numbers, mesh_dim_names=("pp", "dp", "tp"))
        return [*on_three_axes(usual, every), *on_three_axes(turned, some), *on_three_axes(mixed, some)]

    by_case = zip(*run_ranks(body, 8), strict=True)
    for (_, reduction, norm_type), found in zip([*every, *some, *some], by_case, strict=True):
        check(found, SHAPES, 2 if reduction == "ordered" else 1, norm_type)


def on_four_ranks():
    """Return norms over dp and tp, of hybrid sharding, and of a list of DTensors over both axes."""
    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for zero in (0, 3):
        model = DDP(Stage(SHAPES, mesh["tp"]), mesh["dp"], zero=zero, per_rank=True)
        backward(model, SHAPES, mesh["tp"])
        found += [(measure(model), SHAPES), (measure(list(model.parameters())), SHAPES)]
    params = []
    for name, placements in {"a": (Shard(0), Shard(1)), "b": (Replicate(), Shard(0)), "f": (Replicate(),) * 2}.items():
        params.append(nn.Parameter(cut(torch.zeros(SHAPES[name], dtype=torch.float64), mesh, placements)))
        params[-1].grad = cut(gradient(name), mesh, placements)
    found.append((measure(params), "abf"))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for reduction, collectives in (("backend", 1), ("ordered", 2)):
        model = DDP(Stage(SHAPES), grid, zero=2, reduction=reduction)
        backward(model, SHAPES)
        found.append((measure(model), SHAPES, collectives))
    return found


def by_case(body):
    for same in zip(*run_ranks(body, 4), strict=True):
        yield [found for found, *_ in same], *same[0][1:]


def test_one_collective_over_two_axes():
    for case in by_case(on_four_ranks):
        check(*case)


@ranks(2)
def test_axes_of_one_rank_and_nothing_to_reduce():
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    for zero, collectives in ((0, 0), (1, 1)):
        model = DDP(Stage(SHAPES, mesh["tp"]), mesh["dp"], zero=zero, per_rank=True)
        backward(model, SHAPES, mesh["tp"])
        check([measure(model, norm_axes=[mesh["pp"], mesh["tp"]])], SHAPES, collectives)
    check([measure(Stage("ab"))], "", 0)


def all_replicas_count(_span, _dims):
    return True


def none_but_the_first_rank_counts(span, _dims):
    return not any(span.mesh.get_coordinate())


@pytest.mark.parametrize("wrong", [all_replicas_count, none_but_the_first_rank_counts])
def test_a_wrong_variant_is_seen(monkeypatch, fault, wrong):
    fault(monkeypatch, "whether a replica counts in a norm", lambda _right: wrong)
    for case in by_case(on_four_ranks):
        with pytest.raises(AssertionError, match=r"Scalars are not close|assert 2 == 1"):
            check(*case)


def with_gradients(names, tp=None):
    module = Stage(names, tp)
    backward(module, names, tp)
    return module


def on_stages(steps):
    """Return norms where stages have parameters of some kinds, others at each step; "tp" is cut over tp, "" unused.

    The dtype of the norm is that of a stage's own parameters, so one has to be there.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = mesh.get_local_rank("pp")
    found = []
    for kinds in steps:
        names = ["abc", "def"][stage] if kinds[stage] else ""
        module = with_gradients(names, mesh["tp"] if kinds[stage] == "tp" else None)
        if not names:
            module.unused = nn.Parameter(torch.zeros((), dtype=torch.float64))
        found.append(measure(module, norm_axes=mesh["pp"]))
    return found


def test_stages_that_have_different_axes():
    """What they agree on at first stays so; tp, if it came later, is reduced by itself on the stages that have it."""
    cases = [
        [("tp", "plain"), ("plain", "tp"), ("tp", "plain")],
        [("tp", ""), ("", "tp"), ("tp", "")],
        [("plain", "plain"), ("tp", "plain"), ("plain", "plain")],
    ]

    for number, steps in enumerate(cases):  # each in processes of its own, which have agreed on nothing
        by_rank = run_ranks(on_stages, 4, steps)
        for step, (kinds, found) in enumerate(zip(steps, zip(*by_rank, strict=True), strict=True)):
            names = "".join(n for n, kind in zip(("abc", "def"), kinds, strict=True) if kind)
            late = [int((number, step) == (2, 1) and rank < 2) for rank in range(4)]
            check([(norm, count - more) for (norm, count), more in zip(found, late, strict=True)], names)


def with_experts(expert_ranks):
    """Return norms where dense parameters are cut over dp and tp, and experts over a mesh of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = DeviceMesh("cpu", expert_ranks, mesh_dim_names=("edp", "ep"))
    params = []
    for name, home, placements in [
        ("a", mesh, (Shard(0), Shard(1))),
        ("b", mesh, (Replicate(), Shard(0))),
        ("d", experts, (Replicate(), Shard(1))),
        ("f", experts, (Shard(1), Shard(0))),
    ]:
        params.append(nn.Parameter(cut(torch.zeros(SHAPES[name], dtype=torch.float64), home, placements)))
        params[-1].grad = cut(gradient(name), home, placements)
    params.append(nn.Parameter(torch.zeros(SHAPES["e"], dtype=torch.float64)))
    params[-1].grad = gradient("e")
    return [measure(params), measure(params[::-1])]


def test_experts_on_a_mesh_of_their_own():
    """In the last case the ranks of ep lie along no axis of the other mesh: they are reduced by themselves."""
    meshes = {((0, 1, 2, 3),): 1, ((0, 2), (1, 3)): 1, ((3, 2), (1, 0)): 1, ((0, 3), (1, 2)): 2}
    by_rank = run_ranks(lambda: [with_experts(mesh) for mesh in meshes], 4)
    for collectives, of_mesh in zip(meshes.values(), zip(*by_rank, strict=True), strict=True):
        for found in zip(*of_mesh, strict=True):
            check(found, "abdef", collectives)


@ranks(4)
def test_meshes_without_anything_in_common():
    """Each axis a mesh of its own, made of a process group."""
    rank = dist.get_rank()
    tp, pp = (
        DeviceMesh.from_group(group_of_ranks(line), "cpu", mesh_dim_names=(name,))
        for name, lines in (("tp", [[0, 1], [2, 3]]), ("pp", [[0, 2], [1, 3]]))
        for line in lines
        if rank in line
    )
    module = with_gradients(["abc", "def"][rank // 2], tp)
    check([measure(module, norm_axes=[pp])], SHAPES, 2)


@pytest.mark.parametrize("holder", [0, 1])
@ranks(2)
def test_a_nan_on_any_rank_is_the_norm_of_all(holder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, math.nan if dist.get_rank() == holder else 2.0])
    for norm_type in (1.0, 2.0, math.inf):
        assert math.isnan(clip_grad_norm_([param], math.inf, norm_type=norm_type, norm_axes=[mesh]))


@ranks(4)
def test_ranks_that_share_some_parameters_only():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    param = nn.Parameter(cut(torch.zeros(4, 4), mesh["tp"], [Shard(0)]))
    params = [param, nn.Parameter(cut(torch.zeros(4), mesh["dp"], [Shard(0)]))] if dist.get_rank() % 2 else [param]
    expected = (
        r"the set of mesh axes of the parameters given to clip_grad_norm_ differs between ranks: "
        r"rank \d has .*axes tp., rank \d has .*axes dp x tp. \(axis 'tp'\)"
    )
    for _ in range(2):  # nothing has been agreed on in the first call
        with CommDebugMode() as comm, pytest.raises(ValueError, match=expected):
            clip_grad_norm_(params, 1.0)
        assert not any("allreduce" in str(op) for op in comm.get_comm_counts())


@ranks(2)
def test_norm_axes_that_overlap():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    with pytest.raises(
        ValueError, match=r"norm_axes has the axis 'pp', .* another of norm_axes goes\) and which counts"
    ):
        clip_grad_norm_(Stage("a"), 1.0, norm_axes=[mesh["pp"], mesh["pp"]])
