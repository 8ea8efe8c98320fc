"""A random operator without a rule is refused on every rank, before it draws, and the error says what to do."""

import re

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, UnsupportedRandomOperator, init_device_mesh
from vescale_testing import ranks

WAYS_OUT = {
    "aten._fused_dropout.default": (
        lambda x: torch.ops.aten._fused_dropout(x, 0.5),
        r"draw it on a plain tensor, or gather with full_tensor\(\) first",
    ),
    "aten.bernoulli_.Tensor": (
        lambda x: x.bernoulli_(torch.full((4, 6), 0.5)),
        "give the tensor of its parameters the mesh of the result and a shape that broadcasts to its own",
    ),
    "aten.normal.Tensor_Tensor": (
        lambda x: torch.normal(x, torch.ones(6)),
        "give the tensor of its parameters the mesh of the result and a shape that broadcasts to its own",
    ),
    "aten.rand_like.out": (
        lambda x: torch.ops.aten.rand_like.out(x, out=torch.zeros(4, 6)),
        "give `out` the mesh and the placements of the result",
    ),
    "aten.exponential.out": (
        lambda x: torch.ops.aten.exponential.out(x[:3], out=x),
        r"give `out` the shape \(3, 6\) of the result",
    ),
    "aten.rand.out": (lambda x: torch.rand(5, 6, out=x), r"give `out` the shape \(5, 6\) of the result"),
    "aten.randperm.generator_out": (
        lambda x: torch.randperm(5, generator=torch.Generator(), out=x),
        r"give `out` the shape \(5,\), and call it outside",
    ),
}


@ranks(2)
def test_what_has_no_rule_and_what_does_not_fit(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    before = torch.get_rng_state()
    for name, (draw, way_out) in WAYS_OUT.items():
        for placements in [(Shard(1),), (Replicate(),)]:
            where = re.escape(f"{name} on a ") + ".*cannot draw what one device draws; "
            with pytest.raises(UnsupportedRandomOperator, match=where + way_out):
                draw(shard(torch.full((4, 6), 0.5), mesh, placements))
    assert torch.equal(torch.get_rng_state(), before)


@ranks(2)
def test_the_error_names_operator_shape_placements_and_mesh(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected = "aten._fused_dropout.default on a DTensor of shape (4, 6), placements (Shard(dim=0),), mesh DeviceMesh("
    with pytest.raises(UnsupportedRandomOperator, match=re.escape(expected)):
        torch.ops.aten._fused_dropout(shard(torch.ones(4, 6), mesh, (Shard(0),)), 0.5)


@ranks(2)
def test_impossible_arguments_raise_on_every_rank(shard):
    """As on one device, on a rank that holds nothing of the tensor as well."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    before = torch.get_rng_state()
    for draw in (
        lambda x: x.bernoulli_(1.5),
        lambda x: x.exponential_(-1.0),
        lambda x: x.uniform_(2.0, 1.0),
        lambda x: x.normal_(0.0, -1.0),
        lambda x: torch.multinomial(x, 9),
        lambda x: torch.native_dropout(x, 1.5, True),
    ):
        for whole in (torch.ones(3000, 6), torch.ones(1, 6)):
            with pytest.raises(RuntimeError):
                draw(whole.clone())
            with pytest.raises(RuntimeError):
                draw(shard(whole, mesh, (Shard(0),)))
    assert torch.equal(torch.get_rng_state(), before)


@ranks(2)
def test_impossible_values_raise_where_they_are(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for draw, text in (
        (lambda x: torch.multinomial(-x, 1), "either `inf`, `nan` or element < 0"),
        (lambda x: torch.multinomial(0 * x, 1), "sum of probabilities <= 0"),
        (lambda x: torch.bernoulli(x + 1), r"probabilities to be in \[0, 1\]"),
        (lambda x: torch.normal(0.0, -x), "std >= 0.0"),
    ):
        with pytest.raises(RuntimeError):
            draw(torch.ones(4, 6))
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match=text):
            draw(shard(torch.ones(4, 6), mesh, (Shard(0),)))
        assert torch.equal(torch.get_rng_state(), before)


@ranks(3)
def test_values_that_a_rank_does_not_have():
    """Outside its mesh a rank cannot follow draws that depend on values."""
    mesh = DeviceMesh("cpu", [0, 2], mesh_dim_names=("tp",))
    local = torch.ones(2 if mesh.get_coordinate() else 0, 3)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
    if mesh.get_coordinate() is None:
        with pytest.raises(
            UnsupportedRandomOperator, match="this rank is not in its mesh, and the random numbers depe"
        ):
            torch.poisson(tensor)
    else:
        assert torch.poisson(tensor).shape == (4, 3)


@ranks(2)
def test_partial_tensors():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for draw in (lambda x: torch.native_dropout(x, 0.5, True), torch.bernoulli, lambda x: x.normal_()):
        tensor = DTensor.from_local(torch.full((4, 6), 0.5), mesh, [Partial()], run_check=False)
        with pytest.raises(
            UnsupportedRandomOperator, match="redistribute to Shard or Replicate before the random operator"
        ):
            draw(tensor)


@ranks(2)
def test_new_random_tensors_beside_a_partial_one_are_not_partial():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    partial = DTensor.from_local(torch.full((4, 6), 0.5), mesh, [Partial()], run_check=False)
    for draw in (torch.rand_like, torch.randn_like, F.dropout):
        torch.manual_seed(3)
        expected = draw(torch.ones(4, 6))
        torch.manual_seed(3)
        assert torch.equal(draw(partial).full_tensor(), expected)


def test_the_error_is_a_not_implemented_error():
    assert issubclass(UnsupportedRandomOperator, NotImplementedError)


def test_every_operator_that_takes_a_generator_has_a_handler():
    """Found in the schemas, not by the tag that the rules go by."""
    taking = {
        operator
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and (operator := overload(name.removeprefix("aten::"))) is not None
        if any("Generator" in str(argument.type) for argument in operator._schema.arguments)
    }
    assert len(taking) > 50
    assert taking <= DTensor._op_dispatcher._custom_op_handlers.keys()


def overload(name):
    """Return an operator by its name with or without an overload, or None for a name without a Python object."""
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), kind or "default", None)
