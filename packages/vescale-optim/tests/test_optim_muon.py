"""`Muon` in one process: matrices have the bits of ``torch.optim.Muon``, everything else those of AdamW."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from vescale.optim import Muon
from vescale_testing import ranks


class Model(nn.Module):
    """A tall, a wide and a square matrix, a stack of experts, an embedding that is the head, and vectors."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.experts = nn.Parameter(torch.randn(3, 10, 7) / 3)
        self.down = nn.Linear(7, 6)
        self.square = nn.Linear(6, 6, bias=False)

    def forward(self, tokens):
        hidden = torch.tanh(self.up(self.embedding(tokens)))
        hidden = torch.einsum("bi,eio->beo", hidden, self.experts).relu().sum(1)
        return self.square(self.down(hidden)) @ self.embedding.weight.T


def build(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def put_gradients(model, step):
    tokens = torch.randint(11, (16,), generator=torch.Generator().manual_seed(step))
    nn.functional.cross_entropy(model(tokens).float(), tokens).backward()


def train(model, *optimizers, steps=3):
    for step in range(steps):
        put_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def train_by_torch(model, settings, adamw, steps=3):
    """Train with torch's optimizers; every matrix of the stack as a matrix alone, which is all that torch takes."""
    vectors = [p for p in model.parameters() if p.ndim == 1]
    experts = [nn.Parameter(matrix) for matrix in model.experts.detach()]
    matrices = [model.up.weight, model.down.weight, model.square.weight, *experts]
    muon = torch.optim.Muon(matrices, **settings)
    others = torch.optim.AdamW([*vectors, model.embedding.weight], **adamw)
    for step in range(steps):
        put_gradients(model, step)
        for index, matrix in enumerate(experts):
            matrix.grad = model.experts.grad[index].clone()
        muon.step()
        others.step()
        model.zero_grad()
    return {fqn: p.detach() for fqn, p in model.named_parameters()}


SETTINGS = [
    {"lr": 0.02},
    {"lr": 0.02, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0},
    {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-5},
    {"lr": torch.tensor(0.02), "adjust_lr_fn": "original", "ns_coefficients": (2.0, -1.5, 0.5)},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_bits_are_those_of_torch(settings, dtype):
    expected = train_by_torch(build(dtype), settings, {"lr": 3e-4, "weight_decay": 0.2})
    model = build(dtype)
    others = {"adamw": ["embedding.weight"], "adamw_lr": 3e-4, "adamw_weight_decay": 0.2}
    actual = train(model, Muon(model.named_parameters(), **settings, **others))
    for fqn, value in expected.items():
        # Element-wise kernels round the last few elements of a tensor differently: a stack has other last elements.
        rtol = torch.finfo(dtype).eps * 4 if fqn == "experts" else 0.0
        torch.testing.assert_close(actual[fqn], value, rtol=rtol, atol=rtol, msg=fqn)


def test_a_matrix_of_the_wrong_method_is_seen():
    model = build()
    expected = train_by_torch(model, {"lr": 0.02}, {"lr": 0.02})
    other = build()
    actual = train(other, Muon(other.parameters(), lr=0.02))  # the embedding is a matrix, too
    assert torch.equal(actual["square.weight"], expected["square.weight"]) is False


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3), (1, 5), (5, 1), (16, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalized_matrices_have_singular_values_near_one(shape, dtype):
    """Of a step from zero without momentum, decay and adjustment, the parameter is minus the orthogonalized gradient.

    Neither the gradient nor the momentum is changed by the iteration, in its own dtype either.
    """
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    param = nn.Parameter(torch.zeros_like(matrix))
    param.grad = matrix.clone()
    optimizer = Muon([param], lr=1 / max(1, shape[0] / shape[1]) ** 0.5, weight_decay=0, momentum=0, nesterov=False)
    optimizer.step()
    result = -param.detach().float()
    u, _, vh = torch.linalg.svd(matrix.float(), full_matrices=False)
    assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.6
    assert torch.linalg.matrix_norm(result - u @ vh, 2) < 0.6
    assert torch.equal(param.grad, matrix)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], matrix)


def test_groups_are_split_by_method_and_live():
    model = build()
    optimizer = Muon(
        [
            {"params": list(model.up.named_parameters("up")), "lr": 0.5, "weight_decay": 0.3},
            {"params": [("experts", model.experts)], "method": "adamw"},
            {"params": [("square", model.square.weight)]},
        ],
        lr=0.02,
        adamw_betas=(0.5, 0.6),
    )
    found = [(g["method"], g["lr"], g["param_names"]) for g in optimizer.param_groups]
    assert found == [
        ("muon", 0.5, ["up.weight"]),
        ("adamw", 0.5, ["up.bias"]),
        ("adamw", 0.02, ["experts"]),
        ("muon", 0.02, ["square"]),
    ]
    assert optimizer.param_groups[2]["betas"] == (0.5, 0.6)
    assert "momentum" not in optimizer.param_groups[1]
    assert optimizer.param_groups[0]["weight_decay"] == optimizer.param_groups[1]["weight_decay"] == 0.3
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 0.0)
    before = copy.deepcopy(model.state_dict())
    put_gradients(model, 0)
    optimizer.step()
    for fqn, value in model.state_dict().items():
        assert torch.equal(value, before[fqn]), fqn
    assert scheduler.get_last_lr() == [0.0] * 4


def test_state_goes_through_a_state_dict_and_a_copy():
    model = build()
    optimizer = Muon(model.named_parameters(), lr=0.02, adamw=[model.embedding.weight])
    train(model, optimizer)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    expected = train(model, optimizer)
    other = build()
    other.load_state_dict(weights)
    fresh = Muon(other.named_parameters(), lr=0.5, adamw=["embedding.*"])
    fresh.load_state_dict(saved)
    pair = copy.deepcopy((other, fresh))
    for actual in (train(other, fresh), train(*pair)):
        for fqn, value in expected.items():
            assert torch.equal(actual[fqn], value), fqn


def test_parameters_without_a_gradient_are_left_alone():
    model = build()
    optimizer = Muon(model.parameters(), lr=0.02)
    put_gradients(model, 0)
    model.up.weight.grad = model.up.bias.grad = None
    before = copy.deepcopy(model.state_dict())
    assert optimizer.step(lambda: 7) == 7
    changed = {fqn for fqn, value in model.state_dict().items() if not torch.equal(value, before[fqn])}
    assert changed == set(before) - {"up.weight", "up.bias"}
    assert model.up.weight not in optimizer.state


def test_what_it_refuses():
    named, params = list(build().named_parameters()), list(build().parameters())
    for settings, text in [
        ({"adamw": ["embeding.weight"]}, r"adamw entry 'embeding.weight' fits no parameter; .*'embedding.weight'"),
        ({"adamw": [torch.zeros(3)]}, r"adamw entry \(3,\) fits no parameter"),
        ({"lr": -1}, "expected a finite number of 0 or more, or a tensor of one for lr, got -1"),
        ({"momentum": float("nan")}, "expected a number for momentum, got nan"),
        ({"lr": torch.zeros(2)}, r"or a tensor of one for lr, got tensor\(\[0., 0.\]\)"),
        ({"ns_steps": 100}, "expected an integer from 0 to 99 for ns_steps, got 100"),
        ({"adjust_lr_fn": "best"}, "expected 'original' or 'match_rms_adamw' for adjust_lr_fn, got 'best'"),
    ]:
        with pytest.raises(ValueError, match=text):
            Muon(named, **settings)
    with pytest.raises(TypeError, match=r"expected tuple of 3 for ns_coefficients, got \(1, 2\)"):
        Muon(named, ns_coefficients=(1, 2))
    with pytest.raises(ValueError, match=r"adamw='e.*' needs names; pass model.named_parameters\(\)"):
        Muon(params, adamw="e.*")
    with pytest.raises(ValueError, match=r'"method": "muon" holds up.bias of shape \(10,\); Muon steps matrices'):
        Muon([{"params": named, "method": "muon"}], adamw="e.*")
    with pytest.raises(ValueError, match='"method" of a param group must be "muon" or "adamw", got \'sgd\''):
        Muon([{"params": params, "method": "sgd"}])


@ranks(1)
def test_a_dtensor_alone():
    mesh = init_device_mesh("cpu", (1,))
    param = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]))
    with pytest.raises(TypeError, match=r"Muon got a DTensor \(w, placements .*use DistributedOptimizer"):
        Muon([("w", param)])
