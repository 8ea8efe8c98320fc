"""Random operators beside operators that mix rows: which of them draw on local tensors, and which on DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP
from vescale_testing import halved, run_ranks

TOKENS, WIDTH = 5, 8


class OnRows(nn.Module):
    """Dropout for rows on dim 0, and statistics of all rows."""

    has_rows_first = True

    def __init__(self):
        super().__init__()
        self.rate = 0.5
        self.lift, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.drop(self.lift(x)).mean(1))

    def drop(self, x):
        return F.dropout(x, self.rate)


class Attention(OnRows):
    def drop(self, x):
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.rate).transpose(1, 2).flatten(2)


class Recomputed(OnRows):
    """Backward repeats code of the module itself, around which no hook runs."""

    has_rows_first, use_reentrant = True, False

    def drop(self, x):
        x = F.dropout(x, 0.1)
        return checkpoint(lambda x: F.dropout(x * x, self.rate) * x, x, use_reentrant=self.use_reentrant)


class RecomputedReentrant(Recomputed):
    use_reentrant = True


class RecomputedAcross(Recomputed):
    has_rows_first = False

    def drop(self, x):
        return super().drop(x.transpose(0, 1)).transpose(0, 1)


class InPlace(OnRows):
    def drop(self, x):
        return x * torch.empty_like(x).bernoulli_(1 - self.rate) + torch.randn_like(x)


class Across(OnRows):
    """Dropout with the rows on dim 1."""

    has_rows_first = False

    def drop(self, x):
        return F.dropout(x.transpose(0, 1), self.rate).transpose(0, 1)


class Chosen(OnRows):
    """Draws by weights."""

    def drop(self, x):
        return x * torch.multinomial(x.detach().flatten(1).abs() + 1, 1)[..., None]


class Counted(OnRows):
    """An operator that takes as many numbers as its operand says."""

    has_rows_first = False

    def drop(self, x):
        return x * torch.poisson(x.detach().abs())


KINDS = (OnRows, Attention, Recomputed, RecomputedReentrant, RecomputedAcross, InPlace, Across, Chosen, Counted)


class Draws(TorchDispatchMode):
    """Note whether random operators run on DTensors."""

    def __init__(self):
        super().__init__()
        self.on_dtensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and func.namespace == "aten"
            and isinstance(args[0], torch.Tensor)
        ):
            self.on_dtensors.append(isinstance(args[0], DTensor))
        return func(*args, **(kwargs or {}))


def trained(model, given, rows=slice(None), rates=(0.5, 0.5)):
    """Return outputs and gradients of calls at some rates, the random state, and where the last call drew."""
    module = model.module if isinstance(model, DDP) else model
    torch.manual_seed(1)
    outputs = []
    for x, rate in zip(given, rates, strict=True):
        module.rate = rate
        with Draws() as draws:
            out = model(x[rows])
        out.square().mean().backward()
        outputs.append(out.detach())
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return outputs, gradients, torch.get_rng_state(), draws.on_dtensors


def compared(kind, num_rows, rates=(0.5, 0.5), **settings):
    """Return where the last call drew, and the largest difference from one device."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    shape = num_rows * size, TOKENS, WIDTH
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in rates]
    rows = slice(num_rows * rank, num_rows * (rank + 1))
    torch.manual_seed(0)
    module = kind().double()
    expected, gradients, state, _ = trained(module, given, rates=rates)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    model = DDP(kind().double(), mesh, **settings)
    outputs, mine, my_state, on_dtensors = trained(model, given, rows, rates)
    assert settings or torch.equal(state, my_state)
    pairs = [*zip(outputs, (each[rows] for each in expected), strict=True), *zip(mine, gradients, strict=True)]
    return on_dtensors, max((one - other).abs().max().item() for one, other in pairs)


@halved
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_for_rows_on_dim_0_run_on_local_tensors(kind, size):
    for on_dtensors, difference in run_ranks(compared, size, kind, 4):
        assert difference < 1e-10
        assert on_dtensors
        assert any(on_dtensors) is not kind.has_rows_first


@pytest.mark.parametrize("kind", [OnRows, Attention, Across])
def test_ranks_that_draw_as_if_alone_differ(kind):
    for _, difference in run_ranks(compared, 2, kind, 4, per_rank=True):
        assert difference > 1e-3


@pytest.mark.parametrize("kind", [OnRows, Attention, InPlace])
def test_a_single_row_on_each_rank(kind):
    for on_dtensors, difference in run_ranks(compared, 3, kind, 1):
        assert difference < 1e-10
        assert not any(on_dtensors)


# ------------------------------------------------------------------------------------------------- nothing mixes rows


class RecomputedInOrder(Recomputed):
    """Three draws of equal local shapes, of which only the order of calls tells apart where the rows are."""

    has_rows_first = False

    def drop(self, x):
        x = F.dropout(x, 0.1)
        x = checkpoint(lambda x: F.dropout(x.transpose(0, 1) * 2, self.rate), x, use_reentrant=self.use_reentrant)
        return checkpoint(lambda x: F.dropout(x.transpose(0, 1) * 2, self.rate), x, use_reentrant=self.use_reentrant)


class RecomputedInOrderReentrant(RecomputedInOrder):
    use_reentrant = True


@pytest.mark.parametrize("kind", [RecomputedInOrder, RecomputedInOrderReentrant])
def test_functions_that_backward_repeats_in_another_order(kind):
    for on_dtensors, difference in run_ranks(compared, 2, kind, TOKENS):
        assert difference < 1e-10
        assert any(on_dtensors)
        assert not all(on_dtensors)


class RecomputedAlone(Recomputed):
    """Without what mixes rows."""

    def forward(self, x):
        return self.drop(self.lift(x))


def test_a_function_that_backward_repeats_where_nothing_mixes_rows():
    for on_dtensors, difference in run_ranks(compared, 2, RecomputedAlone, 4):
        assert difference < 1e-10
        assert not any(on_dtensors)


class AcrossAlone(Across):
    def forward(self, x):
        return self.drop(self.lift(x))


class CountedAlone(Counted):
    def forward(self, x):
        return self.drop(self.lift(x))


@pytest.mark.parametrize("kind, rates", [(AcrossAlone, (1e-9, 0.5)), (CountedAlone, (0.5, 0.5))])
def test_equal_values_in_the_first_call_do_not_decide_where_rows_are(kind, rates):
    """A mask of a tiny rate has no zeros, wherever it is drawn."""
    for on_dtensors, difference in run_ranks(compared, 2, kind, 4, rates=rates):
        assert difference < 1e-10
        assert any(on_dtensors)


class Shifted(OnRows):
    """One number in a tensor with a dim, of which the results show nothing."""

    def forward(self, x):
        return self.lift(x).roll(int(torch.randint(1, TOKENS, (1,))), 1).sum(1)


class Branching(OnRows):
    """One number decides, as in layers that are left out at random."""

    def forward(self, x):
        x = self.lift(x)
        for _ in range(3):
            if torch.rand([]) < self.rate:
                x = F.dropout(x.tanh(), self.rate)
        return x


@halved
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [Shifted, Branching])
def test_numbers_that_belong_to_no_row(kind, size):
    for _, difference in run_ranks(compared, size, kind, 4):
        assert difference < 1e-10
