"""The generator: deferred_init leaves it alone, materialize advances it like the constructor, nothing is silent."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vescale.dtensor import deferred_init, is_deferred, materialize


def parameters_and_state(module):
    return [parameter.detach() for parameter in module.parameters()], torch.get_rng_state()


def assert_same(ctor, *, seed=2):
    torch.manual_seed(seed)
    expected, expected_state = parameters_and_state(ctor())
    torch.manual_seed(seed)
    actual, state = parameters_and_state(materialize(deferred_init(ctor)))
    assert torch.equal(expected_state, state)
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


def test_a_draw_between_is_an_error_that_names_the_fix():
    module = deferred_init(nn.Linear, 3, 3)
    state = torch.get_rng_state()
    torch.rand(1)
    with pytest.raises(
        ValueError, match=r"not in the state that deferred_init found.*materialize before any other random operator"
    ):
        materialize(module)
    torch.set_rng_state(state)
    materialize(module)


def test_a_module_that_draws_nothing_does_not_care():
    module = deferred_init(nn.LayerNorm, 3)
    torch.rand(1)
    state = torch.get_rng_state()
    materialize(module)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_constructors_at_once_are_an_error():
    module = nn.Sequential(deferred_init(nn.Linear, 3, 3), deferred_init(nn.Linear, 3, 3))
    with pytest.raises(ValueError, match="tensors of 2 calls of deferred_init"):
        materialize(module)


def test_one_constructor_after_the_other():
    torch.manual_seed(0)
    eager = [nn.Linear(3, 3), nn.Linear(3, 3)]
    torch.manual_seed(0)
    modules = [materialize(deferred_init(nn.Linear, 3, 3)) for _ in range(2)]
    for one, other in zip(eager, modules, strict=True):
        assert torch.equal(one.weight, other.weight)


def test_seeding_inside_the_constructor():
    def ctor():
        first = nn.Linear(3, 3)
        torch.manual_seed(99)
        return nn.Sequential(first, nn.Linear(3, 3))

    assert_same(ctor)


def test_seeding_at_the_end_of_the_constructor():
    def ctor():
        module = nn.Linear(3, 3)
        torch.manual_seed(99)
        return module

    assert_same(ctor)


def test_fork_rng_returns_to_the_state_that_the_draws_before_it_left():
    def ctor():
        layers = [nn.Linear(3, 3)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            layers.append(nn.Linear(3, 3))
        layers.append(nn.Linear(3, 3))
        return nn.Sequential(*layers)

    assert_same(ctor)


def test_saved_states_may_be_set_in_any_order():
    def ctor():
        layers, states = [], [torch.get_rng_state()]
        for _ in range(3):
            layers.append(nn.Linear(3, 3))
            states.append(torch.get_rng_state())
        for place in (2, 0, 1, 0):
            torch.set_rng_state(states[place])
            layers.append(nn.Linear(3, 3))
        return nn.Sequential(*layers)

    assert_same(ctor)


def test_reads_of_random_values_take_the_same_branches():
    def ctor():
        layers = []
        torch.manual_seed(17)
        while torch.rand(()).item() < 0.8:
            layers.append(nn.Linear(2, 2))
            with torch.random.fork_rng(devices=[]):
                layers.append(nn.Linear(int(torch.randint(1, 5, ())), 2))
            if bool((torch.poisson(torch.ones(3)) > 1).any()):
                layers.append(nn.Linear(2, 3))
        return nn.Sequential(*layers)

    assert_same(ctor)


def test_values_that_decide_how_much_is_drawn_are_replayed():
    """`poisson` and sampling without replacement cannot be skipped, also where their result is not used."""

    def ctor():
        rates = torch.rand(20) * 9
        torch.poisson(rates)
        torch.multinomial(rates, 5)
        torch.randperm(13)
        torch.empty(5, 4).t().normal_()
        torch.bernoulli(torch.full((7,), 0.3))
        return nn.Linear(3, 3)

    assert_same(ctor)


def test_small_normal_leaves_its_second_value_behind():
    def ctor():
        module = nn.Module()
        module.odd = nn.Parameter(torch.randn(3))
        module.next = nn.Parameter(torch.randn(2))
        return module

    assert_same(ctor)


def test_own_generators():
    def build(generator):
        module = nn.Module()
        module.a = nn.Parameter(torch.randn(20, generator=generator))
        module.b = nn.Parameter(torch.empty(20).uniform_(generator=generator))
        module.c = nn.Parameter(torch.randn(20))
        return module

    assert_same(lambda: build(torch.Generator().manual_seed(8)))

    eager_generator, generator = (torch.Generator().manual_seed(8) for _ in range(2))
    eager = build(eager_generator)
    before = generator.get_state()
    module = deferred_init(build, generator)
    assert torch.equal(generator.get_state(), before)
    materialize(module)
    assert torch.equal(module.b, eager.b)
    assert torch.equal(generator.get_state(), eager_generator.get_state())


def test_own_generator_used_between_is_an_error():
    generator = torch.Generator().manual_seed(8)
    module = deferred_init(lambda: nn.Parameter(torch.randn(20, generator=generator)))
    holder = nn.Module()
    holder.p = module
    torch.rand(1, generator=generator)
    with pytest.raises(ValueError, match="not in the state that deferred_init found"):
        materialize(holder)


def test_a_failing_constructor_leaves_the_generator_alone():
    state = torch.get_rng_state()

    def ctor():
        nn.Linear(3, 3)
        raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        deferred_init(ctor)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)


class FailAfter(TorchDispatchMode):
    """Fail at a random operator, after some others."""

    def __init__(self, count):
        super().__init__()
        self.left = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [0, 1])
def test_a_failing_replay_changes_neither_module_nor_generator(count):
    torch.manual_seed(0)
    eager = nn.Linear(3, 3)
    torch.manual_seed(0)
    module = deferred_init(nn.Linear, 3, 3)
    state = torch.get_rng_state()
    with FailAfter(count), pytest.raises(ZeroDivisionError):
        materialize(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(is_deferred(parameter) for parameter in module.parameters())
    materialize(module)
    assert torch.equal(module.weight, eager.weight)
    assert torch.equal(module.bias, eager.bias)


def test_forgetting_the_returns_shows():
    """The negative sibling: without restoring the place after fork_rng, the third layer differs."""

    def ctor(restore):
        layers = [nn.Linear(3, 3)]
        state = torch.get_rng_state()
        layers.append(nn.Linear(3, 3))
        if restore:
            torch.set_rng_state(state)
        layers.append(nn.Linear(3, 3))
        return nn.Sequential(*layers)

    torch.manual_seed(0)
    eager = ctor(True)
    torch.manual_seed(0)
    module = materialize(deferred_init(ctor, False))
    assert not torch.equal(eager[2].weight, module[2].weight)
