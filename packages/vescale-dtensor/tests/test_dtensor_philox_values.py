"""Numbers of the stream "philox" have their distributions, and choices are what they should be."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import DTensor, Replicate, Shard, UnsupportedRandomOperator, init_device_mesh, random
from vescale.dtensor._random.philox import values as _values
from vescale_testing import ranks

N = 100_000
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def drawn(draw, seed=1):
    with random.stream("philox", seed=seed):
        return draw()


def four_sigma(num_draws, p=0.5):
    """How far a share of `num_draws` is from its probability `p` at most, but for one in 16,000."""
    return 4 * math.sqrt(p * (1 - p) / num_draws)


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


CONTINUOUS = {  # draw, cumulative distribution
    "uniform": (lambda x: x.uniform_(-1, 3), lambda v: (v + 1) / 4),
    "normal": (lambda x: x.normal_(2, 3), lambda v: normal_cdf((v - 2) / 3)),
    "exponential": (lambda x: x.exponential_(1.5), lambda v: 1 - torch.exp(-1.5 * v)),
    "cauchy": (lambda x: x.cauchy_(1, 2), lambda v: 0.5 + torch.atan((v - 1) / 2) / math.pi),
    "log normal": (lambda x: x.log_normal_(0.5, 0.7), lambda v: normal_cdf((v.log() - 0.5) / 0.7)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_kolmogorov_smirnov(name, dtype):
    draw, cdf = CONTINUOUS[name]
    values = drawn(lambda: draw(torch.empty(N, dtype=dtype))).double().sort().values
    steps = torch.arange(N + 1, dtype=torch.float64) / N
    expected = cdf(values)
    distance = max((expected - steps[:-1]).max(), (steps[1:] - expected).max())
    assert distance < 1.95 / math.sqrt(N)  # one in a thousand is larger
    assert (cdf(values * 1.1 + 0.05) - steps[1:]).abs().max() > 1.95 / math.sqrt(N)


@pytest.mark.parametrize("dtype", FLOATS)
def test_mean_variance_and_correlations(dtype):
    x = drawn(lambda: torch.randn(N, dtype=dtype)).double()
    assert abs(x.mean()) < 4 / math.sqrt(N)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / N)
    for shift in (1, 2, 3, 4, 7):  # neighbours come from one pair, or from one block
        assert abs((x[:-shift] * x[shift:]).mean()) < 4.5 / math.sqrt(N)
    y = drawn(lambda: (torch.rand(1), torch.randn(N, dtype=dtype))[1]).double()
    assert abs((x * y).mean()) < 4 / math.sqrt(N)


def test_integers_are_uniform():
    for dtype, low, high in [(torch.int64, -3, 7), (torch.int32, 0, 10), (torch.uint8, 5, 15), (torch.float32, 0, 10)]:
        values = drawn(lambda d=dtype, a=low, b=high: torch.empty(N, dtype=d).random_(a, b))
        counts = torch.bincount((values.long() - low), minlength=10)
        assert len(counts) == 10
        assert ((counts - N / 10) ** 2 / (N / 10)).sum() < 27.9  # chi squared of 9 degrees, one in a thousand
    wide = drawn(lambda: torch.empty(N, dtype=torch.int64).random_(-(2**63), None))
    assert abs(wide.double().mean()) < 4 * 2**63 / math.sqrt(3 * N)
    assert len({v & 0xFF for v in wide.tolist()}) == 256
    assert drawn(lambda: torch.empty(N, dtype=torch.bool).random_()).float().mean() == pytest.approx(
        0.5, abs=four_sigma(N)
    )
    assert drawn(lambda: torch.empty(N, dtype=torch.int8).random_()).min() >= 0
    half = drawn(lambda: torch.empty(N, dtype=torch.float16).random_())
    assert 2000 < float(half.max()) <= 2048


def test_integers_of_the_widest_ranges_stay_inside():
    words = torch.tensor([[0, 0, 2**32 - 1, 2**32 - 1], [2**31, 0, 2**31, 5]], dtype=torch.int64).to(torch.uint32)
    for low, span in [(0, 2**33), (-5, 2**63), (-(2**63), 2**64), (-(2**62), 2**63 + 2**62)]:
        values = _values.Integers(torch.int64, low, span).values(words).flatten().tolist()
        pairs = [0, 2**64 - 1, 2**63, 2**63 + 5]
        expected = [low + (p % span if span > 2**63 else p % 2**63 % span) for p in pairs]
        assert values == expected, span


def test_geometric_and_bernoulli_frequencies():
    trials = drawn(lambda: torch.empty(N).geometric_(0.3))
    for k in (1, 2, 5):
        p = 0.3 * 0.7 ** (k - 1)
        assert float((trials == k).float().mean()) == pytest.approx(p, abs=four_sigma(N, p))
    assert trials.min() == 1
    for p in (0.0, 1e-3, 0.5, 1.0):
        share = float(drawn(lambda p=p: torch.empty(N).bernoulli_(p)).mean())
        assert share == pytest.approx(p, abs=four_sigma(N, p))
    chance = torch.linspace(0, 1, 11).repeat(N // 10)
    hits = drawn(lambda: torch.bernoulli(chance)).view(-1, 11).mean(0)
    torch.testing.assert_close(hits, chance[:11], atol=four_sigma(N // 10), rtol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_stay_below_the_upper_bound(dtype):
    for low, high in [(0.0, 1.0), (-0.3, 1.7), (1000.0, 1001.0), (2.0, 2.0)]:
        values = drawn(lambda a=low, b=high: torch.empty(N, dtype=dtype).uniform_(a, b))
        bounds = torch.tensor([low, high], dtype=dtype)
        assert values.min() >= bounds[0]
        assert values.max() < bounds[1] or bounds[0] == bounds[1]


def test_dropout_keeps_what_its_mask_says():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    y, mask = drawn(lambda: torch.native_dropout(x, 0.25, True))
    assert torch.equal(y, torch.where(mask, x * (1 / 0.75), torch.zeros_like(x)))
    assert torch.equal(drawn(lambda: F.dropout(x, 0.25)), drawn(lambda: F.dropout(x.clone(), 0.25, inplace=True)))
    assert torch.equal(drawn(lambda: torch.native_dropout(x, 0.25, False))[0], x)
    assert not drawn(lambda: torch.native_dropout(x, 1.0, True))[0].any()


def test_rrelu_keeps_its_noise():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = drawn(lambda: F.rrelu(x, 0.1, 0.4, training=True))
    y.sum().backward()
    slopes = x.grad[x < 0]
    assert torch.equal(x.grad[x > 0], torch.ones_like(x.grad[x > 0]))
    assert 0.1 <= slopes.min() < 0.11
    assert 0.39 < slopes.max() < 0.4
    assert torch.allclose(y, x * x.grad)


# ------------------------------------------------------------------------------------------------- choices


def test_permutations():
    for n in (0, 1, 2, 1000):
        permutation = drawn(lambda n=n: torch.randperm(n))
        assert torch.equal(permutation.sort().values, torch.arange(n))
    firsts = drawn(lambda: torch.stack([torch.randperm(4) for _ in range(2000)]))
    for position in range(4):
        assert torch.allclose(
            firsts[:, position].bincount(minlength=4) / 2000, torch.full((4,), 0.25), atol=four_sigma(2000, 0.25)
        )
    assert drawn(lambda: torch.randperm(5, dtype=torch.int32)).dtype == torch.int32


@pytest.mark.parametrize("replacement", [True, False])
def test_samples_of_categories(replacement):
    weights = torch.tensor([0.1, 0.0, 0.5, 0.3, 0.1])
    rows = drawn(lambda: torch.multinomial(weights.expand(20_000, 5), 2, replacement=replacement))
    assert rows.shape == (20_000, 2)
    first, second = (rows[:, k].bincount(minlength=5) / len(rows) for k in range(2))
    torch.testing.assert_close(first, weights, atol=four_sigma(20_000), rtol=0)
    if replacement:
        torch.testing.assert_close(second, weights, atol=four_sigma(20_000), rtol=0)
    else:
        assert (rows[:, 0] != rows[:, 1]).all()
        after_third = rows[rows[:, 0] == 2, 1].bincount(minlength=5)
        num, expected = int(after_third.sum()), weights.index_fill(0, torch.tensor(2), 0) * 2
        torch.testing.assert_close(after_third / num, expected, atol=four_sigma(num), rtol=0)


@ranks(3)
def test_samples_of_sharded_rows(shard, shard_of):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    weights = torch.rand(7, 5, generator=torch.Generator().manual_seed(0))
    for replacement in (True, False):
        for placements in [(Shard(0),), (Replicate(),)]:
            expected = drawn(lambda r=replacement: torch.multinomial(weights, 3, replacement=r))
            sharded = shard(weights, mesh, placements)
            actual = drawn(lambda s=sharded, r=replacement: torch.multinomial(s, 3, replacement=r))
            assert isinstance(actual, DTensor)
            assert actual.shape == expected.shape
            assert torch.equal(actual.to_local(), shard_of(expected, mesh, placements))
    with pytest.raises(UnsupportedRandomOperator, match="redistribute so that every rank holds full rows"):
        drawn(lambda: torch.multinomial(shard(weights, mesh, (Shard(1),)), 1))
    with random.local_batch(mesh):
        mine = weights[:6].chunk(3)[mesh.get_local_rank()]
        for replacement in (True, False):
            actual = drawn(lambda r=replacement: torch.multinomial(mine, 2, replacement=r))
            assert actual.shape == (2, 2)
    parts = drawn(lambda: torch.multinomial(weights[:6], 2))
    with random.local_batch(mesh):
        assert torch.equal(drawn(lambda: torch.multinomial(mine, 2)), parts.chunk(3)[mesh.get_local_rank()])


# ------------------------------------------------------------------------------------------------- what is refused


WRONG = {
    r"uniform_ expects to - from >= 0.0": lambda x: x.uniform_(1, 0),
    r"normal_ expects std >= 0.0, but found std=-1": lambda x: x.normal_(0, -1),
    r"p to be in \[0, 1\], but got p=1.5": lambda x: x.bernoulli_(1.5),
    r"exponential_ expects 0.0 < lambda < inf, but found lambda=0": lambda x: x.exponential_(0),
    r"geometric_ expects 0.0 < p < 1.0, but found p=1": lambda x: x.geometric_(1),
    r"from=5 >= to=5": lambda x: x.random_(5, 5),
    r"to - 1=299 to be in the range of torch.uint8": lambda x: x.to(torch.uint8).random_(0, 300),
    r"cannot take 4 samples from 3 categories": lambda x: torch.multinomial(x, 4),
    r"expects finite weights >= 0 with at least 2 positive": lambda x: torch.multinomial(x - 1, 2),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_draw_nothing(text):
    with random.stream("philox", seed=0):
        expected = torch.rand(2)
    with random.stream("philox", seed=0):
        with pytest.raises(RuntimeError, match=text):
            WRONG[text](torch.ones(3))
        assert torch.equal(torch.rand(2), expected)


def test_operators_without_a_rule_are_refused():
    refused = {
        "aten.poisson.default": lambda: torch.poisson(torch.ones(3)),
        "aten.binomial.default": lambda: torch.binomial(torch.ones(3), torch.ones(3) / 2),
        "aten._sample_dirichlet.default": lambda: torch._sample_dirichlet(torch.ones(2, 3)),
    }
    for name, draw in refused.items():
        with random.stream("philox", seed=0):
            with pytest.raises(UnsupportedRandomOperator, match=rf'{name} .* has no rule in the stream "philox"'):
                draw()
            with random.stream("torch"):
                draw()


def test_a_generator_of_ones_own_stays_the_stock_one():
    for draw in (
        lambda g: torch.rand(5, generator=g),
        lambda g: torch.randperm(5, generator=g),
        lambda g: torch.empty(5).normal_(generator=g),
    ):
        expected = draw(torch.Generator().manual_seed(4))
        assert torch.equal(drawn(lambda d=draw: d(torch.Generator().manual_seed(4))), expected)
        assert not torch.equal(drawn(lambda d=draw: d(torch.default_generator)), expected)
    assert torch.equal(drawn(lambda: torch.rand(3, generator=torch.default_generator)), drawn(lambda: torch.rand(3)))


def test_results_into_out():
    out = torch.empty(2, 3, dtype=torch.float64)
    drawn(lambda: torch.rand(2, 3, out=out))
    assert torch.equal(out, drawn(lambda: torch.rand(2, 3, dtype=torch.float64)))
    out = torch.empty(0, dtype=torch.int64)
    drawn(lambda: torch.randint(9, (4,), out=out))
    assert torch.equal(out, drawn(lambda: torch.randint(9, (4,))))


def test_attention_draws_the_mask_of_its_scores():
    query = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        actual = drawn(lambda: F.scaled_dot_product_attention(query, query, query, dropout_p=0.5))
    scores = (query @ query.transpose(-1, -2) / 2).softmax(-1)
    expected = drawn(lambda: F.dropout(scores, 0.5)) @ query
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(actual, scores @ query)


def test_an_element_does_not_know_its_neighbours():
    """The shards' values rest on it: a value does not depend on its neighbours in a vector register."""
    words = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, (999, 4), np.uint32))
    for distribution in (
        _values.Normal(torch.float32, 0.1, 3.0),
        _values.Normal(torch.float64),
        _values.LogNormal(torch.float32),
        _values.Exponential(torch.float32),
        _values.Cauchy(torch.float32),
        _values.Uniform(torch.bfloat16, -1, 1),
    ):
        whole = distribution.values(words)
        for start, stop in [(0, 1), (3, 10), (5, 22), (990, 999)]:
            assert torch.equal(distribution.values(words[start:stop].clone()), whole[start:stop]), distribution


def test_compiled_functions_draw_alike():
    """Compiled code would have random numbers of its own; the stream makes it run as it was written."""

    def noisy(x):
        return F.dropout(x * 2, 0.5) + torch.rand(4)

    compiled = torch.compile(noisy, backend="aot_eager")
    compiled(torch.ones(4))
    assert torch.equal(drawn(lambda: compiled(torch.ones(4))), drawn(lambda: noisy(torch.ones(4))))
