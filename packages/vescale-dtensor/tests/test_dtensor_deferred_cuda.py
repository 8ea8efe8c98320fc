"""Models constructed on a CUDA device: the CUDA generator is captured, replayed and advanced like the CPU one."""

import pytest
import torch
from torch import nn

from vescale.dtensor import Shard, deferred_init, init_device_mesh, materialize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Model(nn.Module):
    """More elements than one launch of the random kernels covers, and a rejection loop."""

    def __init__(self, device):
        super().__init__()
        self.big = nn.Linear(1024, 700, device=device)
        self.tail = nn.Parameter(torch.empty(100, 7, device=device))
        nn.init.trunc_normal_(self.tail, 0.0, 1.0, -1.0, 1.0)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.forked = nn.Linear(5, 5, device=device)
        self.last = nn.Linear(5, 5, device=device)


def assert_same(eager, module, states):
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state())
    for (name, one), other in zip(eager.state_dict().items(), module.state_dict().values(), strict=True):
        assert one.device == other.device, name
        assert torch.equal(one, other), name


def test_a_model_on_cuda():
    torch.manual_seed(1)
    eager = Model("cuda")
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    torch.manual_seed(1)
    module = deferred_init(Model, "cuda")
    before = torch.cuda.get_rng_state()
    assert not torch.equal(before, states[1])
    assert_same(eager, materialize(module), states)


def test_a_model_of_the_cpu_moved_to_cuda():
    torch.manual_seed(1)
    eager = Model("cpu")
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    torch.manual_seed(1)
    module = materialize(deferred_init(Model, "cpu"), device="cuda")
    assert_same(eager.to("cuda"), module, states)


def test_the_other_way_through_the_constructor():
    torch.manual_seed(1)
    eager = Model("cpu").to("cuda")
    torch.manual_seed(1)
    module = materialize(deferred_init(lambda: Model("cpu").to("cuda")))
    assert_same(eager, module, (torch.get_rng_state(), torch.cuda.get_rng_state()))


def test_shards_on_cuda(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        torch.manual_seed(1)
        eager = Model("cuda")
        torch.manual_seed(1)
        module = materialize(deferred_init(Model, "cuda"), mesh, lambda *_: [Shard(0)])
        assert torch.equal(module.big.weight.to_local(), eager.big.weight)
    finally:
        dist.destroy_process_group()
