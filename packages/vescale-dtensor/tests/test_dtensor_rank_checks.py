"""Ranks compare facts: equal ones cost one all-reduce, others raise the same error everywhere."""

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import Shard, check_ranks, distribute_tensor, init_device_mesh, random
from vescale.dtensor.extension import (
    Fact,
    Turns,
    check_facts,
    checksum,
    generator_fact,
    input_facts,
    is_equal,
    pair_of,
    raise_difference,
)
from vescale_testing import ranks


@pytest.fixture(autouse=True)
def default_turns():
    yield
    check_ranks()


def lr(value):
    return Fact("lr", str(value), "pass the same lr on all ranks")


@ranks(4)
def test_a_difference_is_the_same_error_on_every_rank():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = (
        r"^lr must be equal on all ranks: expected 0.1 as on ranks 0, 1, 2, got 0.2 on rank 3 \(also different: beta\)"
        "; pass the same lr on all ranks$"
    )
    rank = dist.get_rank()
    facts = [lr(0.2 if rank == 3 else 0.1), *([Fact("beta", "1", "")] if rank == 3 else [])]
    for over in (mesh, dist.group.WORLD):
        with pytest.raises(ValueError, match=expected):
            check_facts(facts, over)
    row = mesh["tp"]  # ranks 0 and 1 are alike
    if rank < 2:
        check_facts(facts, row)
    else:
        with pytest.raises(ValueError, match=r"expected 0\.1 as on rank 2, got 0\.2 on rank 3"):
            check_facts(facts, row)


@ranks(4)
def test_equal_facts_raise_nothing():
    check_facts([lr(0.1)], init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    check_facts([], dist.group.WORLD)


@ranks(2)
def test_facts_ride_on_a_maximum_of_32_bits():
    facts = [lr(dist.get_rank())]
    numbers = torch.tensor([7, *pair_of(facts, bits=31)], dtype=torch.int32)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    assert not is_equal(numbers[1:].tolist())
    with pytest.raises(ValueError, match="expected 0 as on rank 0, got 1 on rank 1"):
        raise_difference(facts, dist.group.WORLD)


def test_a_pair_of_one_rank_is_equal():
    assert is_equal(pair_of([lr(0.1)]))
    assert is_equal(pair_of([]))
    assert pair_of([lr(0.1)]) != pair_of([lr(0.2)])
    assert all(abs(number) < 2**30 for number in pair_of([lr(0.1)], bits=31))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_an_element_and_the_order_of_rows(dtype):
    x = torch.arange(12).reshape(4, 3).remainder(5).to(dtype)
    changed = x.clone()
    changed[1, 1] = not changed[1, 1] if dtype == torch.bool else changed[1, 1] + 1
    sums = [
        checksum(each).item()
        for each in (x, x.clone(), x.t().contiguous().t(), changed, x[[1, 0, 2, 3]], x[:, [1, 0, 2]])
    ]
    assert sums[0] == sums[1] == sums[2]
    if dtype != torch.bool:
        assert len(set(sums)) == 4


@pytest.mark.parametrize(
    "x", [torch.tensor(3.0), torch.zeros(0, 2), torch.zeros(3, 2)[:, :0], torch.eye(2).to_sparse()]
)
def test_a_checksum_of_any_tensor(x):
    assert checksum(x).dtype == torch.int64


@ranks(2)
def test_what_inputs_are_compared_by():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, sharded = torch.ones(2, 3), distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    facts = input_facts((x, [sharded, 2]), {"mask": None}, checksums=True)
    assert [(fact.name, fact.value) for fact in facts][:4] == [
        ("input 0", "float32 of shape (2, 3)"),
        ("input 1, item 0,", "float32 of shape (4, 3) placed (Shard(dim=0),)"),
        ("input 1, item 1,", "2"),
        ("input 'mask'", "None"),
    ]
    assert len(facts) == 5
    assert facts[4].name == "the values of input 0"
    assert len(input_facts((x,), {}, checksums=False)) == 1


def test_the_generator_as_a_fact():
    torch.manual_seed(3)
    before = generator_fact()
    assert generator_fact() == before
    assert "seed 3," in before.value
    torch.rand(1)
    assert generator_fact() != before
    torch.manual_seed(3)
    assert generator_fact() == before
    with random.stream("philox"):
        random.manual_seed(5)
        assert generator_fact().value == "seed 5, draw 0"


def test_turns():
    check_ranks(every=3)
    turns = Turns()
    assert [turns.is_due() for _ in range(7)] == [True, False, False, True, False, False, True]
    check_ranks(every=0)
    assert not turns.is_on
    assert not any(turns.is_due() for _ in range(7))


@pytest.mark.parametrize("every", [-1, 1.5, True, None])
def test_bad_numbers_of_calls(every):
    with pytest.raises((ValueError, TypeError), match=r"check_ranks: expected .* for every, got"):
        check_ranks(every=every)
