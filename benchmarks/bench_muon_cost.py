"""What Muon adds to a training step, simulated: Newton-Schulz of the busiest rank against the model's own arithmetic.

Floating-point operations are counted. Muon takes five iterations of about 4 n^2 m + 2 n^3 for every n x m matrix (n <=
m), on the owner that `vescale.optim` chooses. The model takes 6 per active parameter and token of a rank's share of the
batch. The matrices are those of the models' layers; embeddings and heads have AdamW. All data- and tensor-parallel
ranks share the matrices; with fewer matrices than ranks, the busiest has one.
"""

from __future__ import annotations

from dataclasses import dataclass

from measure import Result

from vescale.optim._muon.plan import assign_owners, matrix_cost

ITERATIONS, BOUND = 5, 0.04


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer; `num_experts` and `num_active` are 1 for a dense one."""

    hidden: int
    inner: int
    num_layers: int
    kv_hidden: int
    num_experts: int = 1
    num_active: int = 1

    def matrices(self) -> list[tuple[int, int]]:
        """Return the shapes of all matrices."""
        attention = [(self.hidden, self.hidden)] * 2 + [(self.kv_hidden, self.hidden)] * 2
        return (attention + self.num_experts * self._expert()) * self.num_layers

    def num_active_parameters(self) -> int:
        """Return the elements of the matrices that a token meets."""
        attention = 2 * self.hidden * self.hidden + 2 * self.kv_hidden * self.hidden
        return self.num_layers * (attention + self.num_active * sum(n * m for n, m in self._expert()))

    def _expert(self) -> list[tuple[int, int]]:
        return [(self.inner, self.hidden)] * 2 + [(self.hidden, self.inner)]


MODELS = {
    "LLaMA-3-8B": Model(4096, 14336, 32, 1024),
    "LLaMA-3-70B": Model(8192, 28672, 80, 1024),
    "Mixtral-8x7B": Model(4096, 14336, 32, 1024, num_experts=8, num_active=2),
}
# model, data-parallel ranks, tensor-parallel ranks, tokens per step
CASES = [
    ("LLaMA-3-8B", 8, 1, 1 << 20),
    ("LLaMA-3-8B", 64, 1, 1 << 22),
    ("LLaMA-3-8B", 64, 8, 1 << 22),
    ("LLaMA-3-70B", 128, 1, 1 << 23),
    ("LLaMA-3-70B", 128, 8, 1 << 24),
    ("Mixtral-8x7B", 64, 1, 1 << 22),
]


@dataclass(frozen=True)
class Cost(Result):
    """Shares of a step.

    Attributes:
        rows: case -> share of the busiest rank, share if every rank iterated everything, work of the busiest rank
            relative to the mean.
    """

    rows: dict[str, tuple[float, float, float]]

    def table(self) -> str:
        """Return a markdown table, and whether the busiest ranks stay within the bound."""
        lines = ["| case | Muon adds | every rank for itself | busiest / mean |", "|---|---:|---:|---:|"]
        for case, (share, alone, balance) in self.rows.items():
            lines.append(f"| {case} | {share:.2%} | {alone:.1%} | {balance:.3f} |")
        over = [case for case, (share, _, _) in self.rows.items() if share > BOUND]
        return "\n".join([*lines, "", f"- at most {BOUND:.0%}: {'MISSED: ' + '; '.join(over) if over else 'met'}"])


def run(num_rounds: int) -> Result:
    """Count; ``num_rounds`` does not matter."""
    del num_rounds
    rows = {}
    for name, dp, tp, tokens in CASES:
        model = MODELS[name]
        costs = [ITERATIONS * matrix_cost(*shape) for shape in model.matrices()]
        num_ranks = dp * tp
        loads = [0] * num_ranks
        for cost, owner in zip(costs, assign_owners(costs, num_ranks), strict=True):
            loads[owner] += cost
        step = 6 * model.num_active_parameters() * tokens / num_ranks
        case = f"{name}, dp {dp}, tp {tp}, {tokens / (1 << 20):.0f} Mi tokens a step"
        rows[case] = max(loads) / step, sum(costs) / step, max(loads) * num_ranks / sum(costs)
    return Cost("What Muon adds to a step, in floating-point operations of the busiest rank", "AdamW", {}, rows)
