"""On a GPU, whose backward runs on threads of autograd, ranks train as one device: statistics and draws."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP

ROWS, WIDTH = 4, 8


class Net(nn.Module):
    def __init__(self, norm, recompute):
        super().__init__()
        self.lift, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.recompute = recompute

    def forward(self, x):
        x = self.lift(x)
        if self.recompute is None:
            return self.out(self.norm(self.part(x)))
        return self.out(self.norm(checkpoint(self.part, x, use_reentrant=self.recompute)))

    def part(self, x):
        return F.dropout(x.relu(), 0.5) * x


def trained(model, x):
    torch.manual_seed(1)
    for _ in range(2):
        out = model(x)
        out.square().mean().backward()
    return out


def difference(norm, recompute):
    """Return the largest difference of outputs and gradients from one device, on the GPU that the ranks share."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(ROWS * size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).cuda()
    mine = slice(ROWS * rank, ROWS * (rank + 1))
    torch.manual_seed(0)
    whole = Net(norm, None).double().cuda()
    torch.manual_seed(0)
    part = Net(norm, recompute).double().cuda()
    expected = trained(whole, x)[mine]
    actual = trained(DDP(part, init_device_mesh("cuda", (size,), mesh_dim_names=("dp",))), x[mine])
    pairs = [
        (actual, expected),
        *((p.grad, q.grad) for p, q in zip(part.parameters(), whole.parameters(), strict=True)),
    ]
    return max((one - other).abs().max().item() for one, other in pairs)


def main():
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    found = {f"{norm} {kind}": difference(norm, kind) for norm in (False, True) for kind in (None, False, True)}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        print(json.dumps(everywhere))
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_that_share_a_gpu_train_as_one_device():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert max(found.values()) < 1e-10, found


if __name__ == "__main__":
    main()
