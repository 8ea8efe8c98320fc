"""The parts of the exact forms: blocks, sums by a tree, and kernel calls that give the bits of single blocks."""

import itertools

import pytest
import torch

from vescale.dtensor import exact
from vescale.dtensor._exact import kernels, passing, pointwise
from vescale.dtensor._exact.blocks import are_whole, block_size, num_blocks_of, starts_of
from vescale.dtensor._torch import dispatch


def test_shards_of_whole_blocks_are_shards_of_the_block_results():
    """The rule of blocks and the rule of `Shard` commute, for one axis and for two."""
    whole = 0
    for size, num_blocks, ranks in itertools.product(range(40), (1, 2, 4, 6, 8), ((2,), (4,), (2, 2), (2, 3))):
        unit, starts = block_size(size, num_blocks), starts_of(size, ranks)
        if are_whole(starts, unit):
            whole += 1
            assert starts_of(num_blocks_of(size, num_blocks), ranks) == tuple(start // unit for start in starts)
    assert whole > 200


def test_other_cuts_are_found():
    assert not are_whole(starts_of(17, (4,)), block_size(17, 8))
    assert are_whole(starts_of(17, (2,)), block_size(17, 8))


@pytest.mark.parametrize("size", [0, 1, 2, 5, 8, 17, 100, 1000])
def test_sums_are_right(size):
    x = torch.randn(size, 3, dtype=torch.float64)
    with exact(num_blocks=8):
        torch.testing.assert_close(x.sum(0), torch.tensor([sum(column) for column in x.t().tolist()]).double())


def test_low_precision_is_added_in_float32():
    ones = torch.ones(4096, dtype=torch.bfloat16)
    with exact():
        assert ones.sum() == 4096  # in bfloat16, 256 + 1 is 256
        assert (ones[None] @ ones[:, None]).item() == 4096


@pytest.mark.parametrize("units", [(4, 3, 5), (5, 8, 4), (16, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_chosen_kernel_calls_give_the_bits_of_single_blocks(units, dtype):
    a, b = (torch.randn(shape, dtype=dtype) for shape in ((16, 24), (24, 20)))
    expected = kernels._block_by_block(a, b, units)
    for _ in range(3):  # the second call chooses
        assert torch.equal(kernels.matrix_products(a, b, units), expected)
    assert torch.equal(kernels._in_batches(a, b, (16, 24, 20)), kernels._block_by_block(a, b, (16, 24, 20)))


def test_a_call_of_another_order_is_not_chosen():
    a, b = torch.randn(4, 4096), torch.randn(4096, 4)
    wrong = kernels._Choice((lambda x, y, _units: (x.flip(1) @ y.flip(0))[None],), kernels._block_by_block)
    assert [wrong.form(a, b, (4, 4096, 4)) for _ in range(2)] == [kernels._block_by_block] * 2


@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid", "exp2", "pow", "softplus", "atan2"])
def test_an_element_has_one_value(name):
    """Alone, in a tensor of any size, and with a stride."""
    functions = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
    functions |= {"softplus": torch.nn.functional.softplus, "pow": lambda x: x.abs() ** 0.7}
    functions |= {"atan2": lambda x: torch.atan2(x, x * x + 1)}
    function = functions.get(name) or getattr(torch, name)
    x = torch.randn(4109)
    strided = torch.stack([x, x], 1)[:, 0]

    def is_same():
        whole = function(x)
        parts = torch.cat([function(part) for part in x.split(5)])
        return torch.equal(whole, parts) and torch.equal(whole, function(strided))

    with exact():
        assert is_same()
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert not is_same()  # a kernel has one code for vectors and one for what is left


def test_operators_of_one_operation_have_one_value():
    """Those that run as they are: in vectors and alone."""
    x, y = torch.rand(4109), torch.randn(4109)
    for name in sorted(pointwise.ONE_OPERATION):
        for op in (dispatch.overload(name), dispatch.overload(f"{name}.Tensor")):
            arguments = [] if op is None else [a for a in dispatch.schema(op).arguments if not a.has_default_value()]
            if name.startswith(("clamp", "clip", "fill", "masked_fill", "where")) or {
                str(a.type) for a in arguments
            } != {"Tensor"}:
                continue
            operands = (x, y)[: len(arguments)]
            parts = [op(*(t[i : i + 5] for t in operands)) for i in range(0, len(x), 5)]
            assert torch.equal(op(*operands), torch.cat(parts)), op


def test_every_operator_of_the_lists_exists():
    known = {op.overloadpacket.__name__ for op in dispatch.operators()}
    for names in (passing.MAKES, passing.COPIES, passing.SELECTS, passing.SETS, passing.PUTS):
        assert names <= known, names - known


def test_no_operator_that_adds_is_on_the_lists():
    adding = {
        "sum",
        "mean",
        "cumsum",
        "scatter_add",
        "index_add",
        "mm",
        "histc",
        "bincount",
        "trace",
        "unfold_backward",
    }
    for name in adding:
        op = dispatch.overload(name) or dispatch.overload(f"{name}.dim")
        assert not passing.adds_nothing(op, (), {}), name
