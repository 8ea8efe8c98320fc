"""A random operator without a rule is refused on every rank, before it draws, and the error says what to do."""

import re

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import DTensor, Partial, Replicate, Shard, UnsupportedRandomOperator, init_device_mesh
from vescale.dtensor import _torch as ours
from vescale.dtensor._random_rules import handlers
from vescale_testing import ranks

REFUSED = {
    "aten.multinomial.default": lambda x: torch.multinomial(x, 2),
    "aten.poisson.default": torch.poisson,
    "aten.binomial.default": lambda x: torch.binomial(x, x),
    "aten.normal.Tensor_float": lambda x: torch.normal(x, 1.0),
    "aten.normal.float_Tensor": lambda x: torch.normal(0.0, x),
    "aten.normal.Tensor_Tensor": lambda x: torch.normal(x, x),
    "aten.bernoulli.p": lambda x: torch.bernoulli(x, 0.3),
    "aten.rrelu_with_noise.default": lambda x: F.rrelu(x, training=True),
    "aten._standard_gamma.default": torch._standard_gamma,
    "aten._sample_dirichlet.default": torch._sample_dirichlet,
    "aten.rand_like.out": lambda x: torch.ops.aten.rand_like.out(x, out=x.clone()),
    "aten.bernoulli_.Tensor": lambda x: x.bernoulli_(torch.tensor(0.5)),
}


@ranks(2)
def test_operators_without_a_rule(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    before = torch.get_rng_state()
    for name, draw in REFUSED.items():
        for placements in [(Shard(0),), (Replicate(),)]:
            expected = re.escape(f"{name} on a DTensor of shape (4, 6), placements {placements}, mesh DeviceMesh(")
            with pytest.raises(
                UnsupportedRandomOperator, match=expected + ".*cannot draw what one device draws; "
            ) as info:
                draw(shard(torch.full((4, 6), 0.5), mesh, placements))
            assert "full_tensor() first" in str(info.value) or "give the probabilities the shape" in str(info.value)
    assert torch.equal(torch.get_rng_state(), before)


@ranks(2)
def test_partial_tensors():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for draw in (F.dropout, torch.rand_like, torch.bernoulli, lambda x: x.normal_()):
        tensor = DTensor.from_local(torch.full((4, 6), 0.5), mesh, [Partial()], run_check=False)
        with pytest.raises(
            UnsupportedRandomOperator, match="redistribute to Shard or Replicate before the random operator"
        ):
            draw(tensor)


@ranks(2)
def test_draws_that_need_row_major_memory(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    transposed = shard(torch.full((4, 6), 0.5).t(), mesh, (Shard(0),))
    for draw in (torch.bernoulli, lambda x: torch.native_dropout(x, 0.5, True)):
        with pytest.raises(UnsupportedRandomOperator, match=r"call \.contiguous\(\) first"):
            draw(transposed)


def test_the_error_is_a_not_implemented_error():
    assert issubclass(UnsupportedRandomOperator, NotImplementedError)


def test_every_operator_that_takes_a_generator_has_a_handler():
    """Found in the schemas, not by the tag that the rules go by."""
    taking = {
        op
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and (op := ours.overload(name.removeprefix("aten::"))) is not None
        if any("Generator" in str(argument.type) for argument in op._schema.arguments)
    }
    assert len(taking) > 50
    assert taking <= handlers().keys()
    assert all(op in ours.handler_table() for op in handlers())
