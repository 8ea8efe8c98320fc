"""An unmodified Mixtral under a tensor-parallel plan and `DDP`: its router's loss, and targets that are ignored."""

import pytest
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

from vescale.dmodule import parallelize_module
from vescale.dmodule.plans import plan_for
from vescale.dtensor import init_device_mesh
from vescale.optim import DDP
from vescale_testing import gather_full, keep_float64, run_ranks

CONFIG = MixtralConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    output_router_logits=True,
    router_aux_loss_coef=0.5,
    attention_dropout=0.1,
    use_cache=False,
)
TOKENS = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(3))
LABELS = TOKENS.masked_fill(torch.arange(32).view(4, 8) < 5, -100)  # of the first row, on the first rank


def build():
    torch.manual_seed(0)
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}  # those that have float64
    return MixtralForCausalLM._from_config(CONFIG, **implementations).double().train()


def train(model, rows=slice(None)):
    """Return the loss and the gradients of one step."""
    torch.manual_seed(1)
    with keep_float64():
        loss = model(input_ids=TOKENS[rows], labels=LABELS[rows]).loss
        loss.backward()
    return loss.detach(), {name: gather_full(p.grad) for name, p in model.named_parameters()}


def largest_difference(mode, **settings):
    """Return the largest difference of ranks to one device, relative to the largest value."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loss, gradients = train(build())
    model = DDP(parallelize_module(build(), mesh["tp"], plan_for(build()), mode=mode), mesh["dp"], **settings)
    first = 2 * mesh["dp"].get_local_rank()
    mine, found = train(model, slice(first, first + 2))
    dist.all_reduce(mine, group=mesh["dp"].get_group())
    pairs = [(mine / 2, loss), *((found[name], gradient) for name, gradient in gradients.items())]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_step_is_that_of_one_device(mode):
    assert max(run_ranks(largest_difference, 4, mode)) < 1e-10


def test_ranks_that_are_worlds_of_their_own_differ():
    assert min(run_ranks(lambda: largest_difference("eager", per_rank=True), 4)) > 1e-3
