"""Two trainings compared: equal ones pass, and whatever differs first is named with its place and both values."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_testing import TrainingRecord, assert_same_training, ranks, run_ranks


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)).double()


def train(model, *, num_steps=3, lr=0.1) -> TrainingRecord:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(2)
    losses, norms = [], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.rand(5, 4, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        losses.append(loss)
        optimizer.step()
    return TrainingRecord.collect(model, optimizer, losses=losses, grad_norms=norms)


@pytest.fixture(scope="module")
def reference() -> TrainingRecord:
    return run_ranks(lambda: train(make_model()), 1, backend=None)[0]


def changed(record: TrainingRecord, kind: str, *path, index=None, by=0.25) -> TrainingRecord:
    """Return a copy of `record` with one number changed."""
    values = copy.deepcopy(getattr(record, kind))
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    if index is None:
        inner[path[-1]] += by
    else:
        inner[path[-1]][index] += by
    return replace(record, **{kind: values})


def test_a_record_holds_everything(reference):
    assert len(reference.losses) == len(reference.grad_norms) == 3
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(reference.params) == list(reference.grads) == list(reference.optimizer_state) == names
    assert set(reference.optimizer_state["0.bias"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_the_same_training_is_the_same_bit_for_bit(reference):
    assert_same_training(train(make_model()), reference, bitwise=True)


def test_another_training_is_not(reference):
    with pytest.raises(AssertionError, match="loss of step 2 differs"):
        assert_same_training(train(make_model(), lr=0.1001), reference, rtol=1e-10)


@ranks(2)
def test_tensor_parallel_training_is_the_same_within_rounding(reference):
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    record = train(model)
    assert_same_training(record, reference, rtol=1e-12)
    with pytest.raises(AssertionError, match=r"gradient of 2.weight"):
        assert_same_training(changed(record, "grads", "2.weight", index=(3, 5)), reference, rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            ("losses", 1),
            r"loss of step 2 differs by .* \(relative\), allowed is 1e-10\n.* difference 0.25: actual ",
        ),
        (("grad_norms", 2), "gradient norm of step 3 differs by"),
        (("grads", "2.bias"), r"gradient of 2.bias after step 3 differs by .*\n.* 0.25 at \(0,\): actual "),
        (("params", "0.weight"), r"parameter 0.weight after step 3 differs by"),
        (("optimizer_state", "0.bias", "exp_avg"), "optimizer state exp_avg of 0.bias after step 3 differs by"),
    ],
)
def test_a_change_of_any_kind_is_named(reference, change, text):
    with pytest.raises(AssertionError, match=text):
        assert_same_training(changed(reference, *change), reference, rtol=1e-10)
    with pytest.raises(AssertionError, match=text.replace("1e-10", "0")):
        assert_same_training(changed(reference, *change), reference, bitwise=True)


def test_the_message_in_full():
    expected = TrainingRecord(losses=[2.0], params={"w": torch.tensor([[1.0, 2.0], [4.0, 0.0]]), "b": torch.ones(1)})
    actual = replace(expected, params={"w": torch.tensor([[1.0, 2.5], [3.0, 0.0]]), "b": torch.ones(1)})
    with pytest.raises(AssertionError) as caught:
        assert_same_training(actual, expected, rtol=1e-6)
    assert str(caught.value) == (
        "parameter w after step 1 differs by 0.25 (relative), allowed is 1e-06\n"
        "largest difference 1 at (1, 0): actual 3.0, expected 4.0\n"
        "1 of 3 compared values differ"
    )


def test_the_earliest_step_comes_first_whatever_its_kind(reference):
    both = changed(changed(reference, "losses", 2), "grad_norms", 1)
    with pytest.raises(AssertionError, match=r"gradient norm of step 2 differs(.|\n)*2 of 26 compared values differ"):
        assert_same_training(both, reference, rtol=1e-10)


def test_the_bound_is_relative_to_the_largest_element():
    expected = TrainingRecord(params={"w": torch.tensor([1e-9, 100.0], dtype=torch.float64)})
    actual = TrainingRecord(params={"w": torch.tensor([2e-9, 100.0], dtype=torch.float64)})
    assert_same_training(actual, expected, rtol=1e-10)
    with pytest.raises(AssertionError, match=r"differs by 1e-11"):
        assert_same_training(actual, expected, rtol=1e-12)
    with pytest.raises(AssertionError, match="allowed is 0"):
        assert_same_training(actual, expected, bitwise=True)


def test_zeros_agree_with_zeros_and_with_nothing_else():
    zeros, tiny = (TrainingRecord(params={"w": torch.tensor([value])}) for value in (0.0, 1e-20))
    assert_same_training(zeros, zeros, rtol=1e-10)
    assert_same_training(TrainingRecord(params={"w": torch.tensor([-0.0])}), zeros, bitwise=True)
    with pytest.raises(AssertionError, match="differs by 1e"):
        assert_same_training(tiny, zeros, rtol=1e-10)


@pytest.mark.parametrize("actual", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("expected", [float("nan"), float("inf")])
@pytest.mark.parametrize("record", ["losses", "params"])
def test_values_that_are_not_finite_never_agree(actual, expected, record):
    values = [{"w": torch.tensor([1.0, v])} if record == "params" else [v] for v in (actual, expected)]
    a, b = (TrainingRecord(**{record: value}) for value in values)
    for one, other in [(a, b), (b, a)]:
        with pytest.raises(AssertionError, match=r"differs by (nan|inf)"):
            assert_same_training(one, other, rtol=1e10)  # no bound is wide enough


def test_shapes_and_dtypes_must_be_equal():
    expected = TrainingRecord(params={"w": torch.ones(2, 3)})
    for other in (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64)):
        with pytest.raises(AssertionError, match=r"w differs in kind\nactual torch.float\d\d of shape \(\d, \d\)"):
            assert_same_training(TrainingRecord(params={"w": other}), expected, rtol=1.0)  # values agree, kinds do not


@pytest.mark.parametrize("kind", ["losses", "grad_norms", "grads", "params", "optimizer_state"])
def test_nothing_may_be_missing_or_added(reference, kind):
    value = getattr(reference, kind)
    first = next(iter(value)) if isinstance(value, dict) else None
    less = replace(reference, **{kind: {k: v for k, v in value.items() if k != first} if first else value[:-1]})
    name = {"losses": "loss of step 3", "grad_norms": "gradient norm of step 3"}.get(kind, first)
    with pytest.raises(AssertionError, match=rf"{name}.* is missing \("):
        assert_same_training(less, reference, rtol=1e-10)
    with pytest.raises(AssertionError, match=rf"{name}.* is not expected \("):
        assert_same_training(reference, less, rtol=1e-10)


def test_a_comparison_that_could_not_fail_is_refused(reference):
    with pytest.raises(ValueError, match="expected a record with values to compare with, got an empty one"):
        assert_same_training(TrainingRecord(), TrainingRecord(), bitwise=True)
    with pytest.raises(ValueError, match="expected either rtol or bitwise=True, got"):
        assert_same_training(reference, reference)
    with pytest.raises(ValueError, match="expected either rtol or bitwise=True, got"):
        assert_same_training(reference, reference, rtol=1e-3, bitwise=True)


@ranks(2)
def test_a_shard_in_a_record_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate()):
        record = TrainingRecord(params={"w": distribute_tensor(torch.ones(4), mesh, [placement])})
        with pytest.raises(TypeError, match=r"w: expected a full torch.Tensor, got a DTensor; gather it"):
            assert_same_training(record, record, bitwise=True)


def test_a_tied_parameter_appears_under_each_of_its_names():
    def tied():
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)})
        model["head"].weight = model["embed"].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model["head"](model["embed"](torch.tensor([1]))).sum().backward()
        optimizer.step()
        return TrainingRecord.collect(model, optimizer)

    (record,) = run_ranks(tied, 1, backend=None)
    for part in (record.params, record.grads, record.optimizer_state):
        assert list(part) == ["embed.weight", "head.weight"]


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(6, 4, dtype=torch.float64)
    optimizer.step()
    with pytest.raises(ValueError, match="got state of parameter 0; pass the model that"):
        TrainingRecord.collect(make_model(), optimizer)
