"""Compiled blocks merge matrix products with the collectives before and after them, where that is switched on."""

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed import _symmetric_memory
from torch.profiler import ProfilerActivity, profile

from vescale.dmodule import _torch, parallelize_module
from vescale.dmodule._compile import blocks as _compile
from vescale.dmodule._static import async_tp as _async_tp
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
WIDTH = 8
PLAN = {
    "parameter": {r".*up\.weight": S0, r".*down\.weight": S1},
    "forward": {
        r"embed\.output": [S1],
        r"blocks\.\d\.up\.input": [R],
        r"blocks\.\d\.down\.output": [S1],
        "output": [R],
    },
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, width), nn.ModuleList([Block(width), Block(width)])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


@contextlib.contextmanager
def switched(on=True):
    before, _async_tp.ENABLED = _async_tp.ENABLED, on
    try:
        yield
    finally:
        _async_tp.ENABLED = before


def train(model, x):
    """Output and whole gradients of one step."""
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
    return {"output": output.detach()} | whole


# ------------------------------------------------------------------------------------------------- on any machine


def merging(merged):
    """A compiler of torch's own pass and nothing else; `merged` gets what it has made of each graph."""

    def compiler(graph, _inputs):
        view_to_reshape(graph)
        micro_pipeline_tp_pass(graph.graph)
        graph.recompile()
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "symm_mem" in str(node.target)]
        merged.append(Counter(names))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table())


def gather_and_multiply(shard, others, dim, group_name, *, return_A=True):  # noqa: N803 - the operator's own name
    """What the operator means, for processors; torch has it for devices."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    came = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(came, shard.contiguous(), group=group)
    whole = torch.cat(came, dim)
    return whole if return_A else None, [whole @ other for other in others]


def multiply_and_scatter(left, right, op, dim, group_name):
    """What the operator means, for processors; torch has it for devices."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    product = left @ right
    assert op == "sum"
    dist.all_reduce(product, group=group)
    return product.chunk(group.size(), dim)[group.rank()].contiguous()


@ranks(2)
def test_products_and_collectives_become_one():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    operators = torch.library.Library("symm_mem", "IMPL")
    operators.impl("fused_all_gather_matmul", gather_and_multiply, "CPU")
    operators.impl("fused_matmul_reduce_scatter", multiply_and_scatter, "CPU")
    # what a machine with devices offers
    dist.is_nccl_available, _torch.async_tp_obstacle, shared = lambda: True, lambda _device: None, []
    _torch.share_memory = lambda group: shared.append(group.group_name)
    _symmetric_memory._is_test_mode = True  # every group counts as sharing memory
    for batch, on in ((1, True), (2, True), (2, False)):
        x = torch.randn(batch, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(0)
        expected = train(Stack().double(), x)
        merged = []
        _compile.BACKEND = merging(merged)
        torch.manual_seed(0)
        with switched(on):
            found = train(parallelize_module(Stack().double(), mesh, PLAN, mode="compile"), x)
        for name, value in expected.items():
            assert (found[name] - value).abs().max() < 1e-12 * value.abs().max(), name
        assert len(merged) >= 2  # a forward and a backward at least
        both = {"fused_all_gather_matmul": 1, "fused_matmul_reduce_scatter": 1}
        assert all(counts == (both if on else {}) for counts in merged), (batch, merged)
    assert shared == [mesh.get_group().group_name] * len(shared) != []


@ranks(2)
def test_a_machine_without_it():
    """The error comes before anything communicates; static mode does not ask."""
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(2, 6, 4)
    with switched():
        train(parallelize_module(Stack(), mesh, PLAN, mode="static"), x)
        model = parallelize_module(Stack(), mesh, PLAN, mode="compile")
        with pytest.raises(RuntimeError, match="switched on, but the mesh is on 'cpu', and torch offers it on 'cuda'"):
            model(x)


def test_what_a_torch_may_lack(monkeypatch):
    assert "the mesh is on 'cpu'" in _torch.async_tp_obstacle("cpu")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert _torch.async_tp_obstacle("cuda") == "this torch is built without NCCL"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert _torch.async_tp_obstacle("cuda") is None
    monkeypatch.delattr(_symmetric_memory, "enable_symm_mem_for_group")
    assert _torch.async_tp_obstacle("cuda") == f"torch {torch.__version__} does not offer it"


def test_the_compiler_takes_the_option():
    with switched():
        torch.compile(nn.Identity(), options=_compile.OPTIONS | _async_tp.compiler_options())
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(nn.Identity(), options={"micro_pipeline_tp_of_another_name": True})


# ------------------------------------------------------------------------------------------------- on devices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices that reach each other's memory")
def test_on_devices():
    @ranks(2, backend="nccl", timeout=300)
    def on_every_rank():
        torch.cuda.set_device(dist.get_rank())
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
        x = torch.randn(2, 256, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        found = {}
        for mode in ("static", "compile"):
            torch.manual_seed(0)
            with switched(mode == "compile"):
                model = parallelize_module(Stack(512).cuda(), mesh, PLAN, mode=mode)
                train(model, x)
                with profile(activities=[ProfilerActivity.CPU]) as profiled:
                    found[mode] = train(model, x)
        names = {event.name for event in profiled.events()}
        assert {"symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"} <= names
        for name, value in found["static"].items():
            torch.testing.assert_close(found["compile"][name], value, rtol=1e-3, atol=1e-4 * value.abs().max().item())

    on_every_rank()
