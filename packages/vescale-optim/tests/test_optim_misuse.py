"""What would give a wrong result in silence is an error that says what to do instead."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.optim import DDP, DistributedOptimizer, clip_grad_norm_
from vescale_testing import halved, ranks

SHARDED = r"the gradient of '\S+' is sharded by DDP\(zero=1, 2 or 3\), so .* cannot read param.grad. Use vescale.optim"


def wrapped(zero, module=None, size=2):
    module = module or nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    return DDP(module, init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), zero=zero)


def backward(model):
    model(torch.ones(4, 3)).sum().backward()


@halved
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("zero", [1, 2])
@ranks(2)
def test_a_plain_optimizer_on_sharded_gradients(zero, optimizer_class, foreach):
    model = wrapped(zero)
    optimizer = optimizer_class(model.parameters(), lr=0.1, foreach=foreach)
    backward(model)
    with pytest.raises(RuntimeError, match=SHARDED):
        optimizer.step()


@ranks(2)
def test_a_plain_optimizer_is_right_where_gradients_are_whole():
    model = wrapped(0)
    reference = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    reference.load_state_dict(model.state_dict())
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        backward(each)
        optimizer.step()
    for fqn, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[fqn], value)


READS = {
    "clip": lambda params: nn.utils.clip_grad_norm_(params, 1.0),
    "norm": lambda params: params[0].grad.norm(),
    "multiply": lambda params: params[0].grad.mul_(2),
    "clone": lambda params: params[0].grad.clone(),
}


@halved
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("zero", [1, 2])
@ranks(2)
def test_reading_a_sharded_gradient(zero, read):
    model = wrapped(zero)
    backward(model)
    with pytest.raises(RuntimeError, match=SHARDED):
        READS[read](list(model.parameters()))


@ranks(1)
def test_a_sharded_gradient_can_be_printed():
    model = wrapped(1, size=1)
    backward(model)
    assert repr(model.module[1].bias.grad) == "ShardedGradient('1.bias', shape=(2,), part=(0, 2))"


@halved
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("act", ["step", "clip"])
@ranks(2)
def test_gradients_that_were_never_reduced(act, zero):
    model = wrapped(zero)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    with model.no_sync():
        backward(model)
    with pytest.raises(RuntimeError, match=r"accumulated inside no_sync\(\) and never reduced. Run the last backward"):
        optimizer.step() if act == "step" else clip_grad_norm_(model, 1.0)
    optimizer.zero_grad()
    optimizer.step()  # nothing to do


@ranks(2)
def test_no_sync_in_the_middle_of_a_backward():
    model = wrapped(0)

    def enter(_grad):
        with model.no_sync():
            pass

    hidden = model(torch.ones(4, 3))
    hidden.register_hook(enter)
    with pytest.raises(RuntimeError, match=r"no_sync\(\) was entered or left during backward\(\)"):
        hidden.sum().backward()


@ranks(2)
def test_a_backward_that_failed_is_not_stepped_over():
    model = wrapped(0)

    def fail(_grad):
        raise ZeroDivisionError

    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    handle = model.module[0].bias.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    handle.remove()
    with pytest.raises(RuntimeError, match=r"reduction of gradients has not finished: backward\(\) ended with"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"got a second gradient before .* call zero_grad\(\) of the DDP module"):
        backward(model)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.to("meta")])
@ranks(1)
def test_moving_the_wrapped_module(move):
    with pytest.raises(RuntimeError, match="DDP holds parameters in flat buffers: move or cast the module before"):
        move(wrapped(1, size=1))


@ranks(1)
def test_loading_by_assignment():
    model = wrapped(1, size=1)
    with pytest.raises(ValueError, match="assign=True would replace the parameters that DDP manages"):
        model.load_state_dict(model.state_dict(), assign=True)


@ranks(1)
def test_sparse_gradients():
    model = wrapped(0, nn.Embedding(4, 2, sparse=True), size=1)
    with pytest.raises(TypeError, match=r"gradient of 'weight' is sparse .*build the embedding with sparse=False"):
        model(torch.tensor([1])).sum().backward()


@ranks(2)
def test_an_optimizer_for_the_module_inside_of_a_ddp():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    sliced = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = DDP(module, sliced["dp"], zero=1)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=module, lr=0.1)
    (module.weight * 2).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of 'weight' is sharded by a DDP; pass that DDP as model="):
        optimizer.step()
    assert model.zero == 1


class Grows(nn.Module):
    """Replaces a part of itself in its first call."""

    def __init__(self):
        super().__init__()
        self.body, self.is_ready = nn.Linear(4, 4), False

    def forward(self, x):
        if not self.is_ready:
            self.body, self.is_ready = nn.Linear(4, 4), True
        return self.body(x)


@pytest.mark.parametrize("zero", [0, 2])
@ranks(2)
def test_parameters_that_the_forward_makes(zero):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    grown, model = Grows(), DDP(Grows(), mesh, zero=zero)
    with pytest.raises(
        RuntimeError, match=r"when DDP wrapped it, got 2 new ones, such as 'body.weight', .* call the module once"
    ):
        model(torch.ones(2, 4))
    grown(torch.ones(2, 4))
    DDP(grown, mesh, zero=zero)(torch.ones(2, 4)).sum().backward()
