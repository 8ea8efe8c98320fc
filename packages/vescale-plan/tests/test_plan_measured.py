"""Activations measured on tensors without data: what autograd really keeps, for any model, without touching it."""

import copy
import functools

import pytest
import torch
from torch import nn

from vescale.plan import Layout, blocks_of, build_model, estimate_memory, profile

SEQ = 24


def kept_for_real(model, block, tokens):
    """Return the bytes of distinct storages that autograd keeps for a block, its output included, its input not."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, inside = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    def begin(_, args):
        inside.append(True)
        own.add(args[0].untyped_storage().data_ptr())

    def end(_, __, output):
        inside.clear()
        kept[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes(), output

    hooks = block.register_forward_pre_hook(begin), block.register_forward_hook(end)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    for hook in hooks:
        hook.remove()
    return sum(num_bytes for num_bytes, _ in kept.values())


class Net(nn.Module):
    """A GPT of the fixture with a forward and a loss."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, idx, targets=None):
        x = self.gpt.embed(idx)
        for block in self.gpt.blocks:
            x = block(x)
        logits = self.gpt.head(self.gpt.norm(x))
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.fixture
def build_net(build_gpt):
    def build(blocks=4, **kwargs):
        return Net(build_gpt(blocks, 64, 4, 200, 100, **kwargs))

    return build


def test_a_block_keeps_what_autograd_keeps(build_net):
    """To the byte for two rows; a wrong model of attention would be off by its scores."""
    model = build_net()
    found = profile(model, sequence_length=SEQ).activations
    kept = found.parts[found.order[2]].kept
    real = kept_for_real(model, model.gpt.blocks[1], torch.zeros(2, SEQ, dtype=torch.long))
    assert kept.fixed.total + 2 * kept.per_row.total == real
    assert real != kept_for_real(model, model.gpt.blocks[1], torch.zeros(3, SEQ, dtype=torch.long))


def test_equal_blocks_are_measured_by_two(build_net):
    few, many = (profile(build_net(blocks), sequence_length=SEQ).activations for blocks in (3, 9))
    assert [few.parts[index] for index in few.order[1:4]] == [many.parts[index] for index in many.order[1:4]]
    assert len(set(many.order[2:10])) == 1
    assert many.flops_per_row - few.flops_per_row == 6 * (
        few.parts[few.order[2]].forward_flops + few.parts[few.order[2]].backward_flops
    )


def test_operations_are_those_of_the_matrices(build_net):
    """Twice the elements of all matrices for a token forward, and attention."""
    found = profile(build_net(), sequence_length=SEQ).activations
    matrices = 4 * 64 * 64 + 2 * 64 * 200
    attention = 2 * SEQ * SEQ * 64 * 2
    assert found.parts[found.order[2]].forward_flops == 2 * SEQ * matrices + attention


def test_what_tensor_parallelism_splits_is_found(build_net):
    found = profile(build_net(), sequence_length=SEQ)
    sharded = {info.fqn for info in found.parameters if info.sharded and ".1." in info.fqn}
    assert sharded == {f"gpt.blocks.1.{name}.weight" for name in ("q", "k", "v", "o", "up", "down")}
    kept = found.activations.parts[found.activations.order[2]].kept.per_row
    e = 4
    assert kept.sharded == SEQ * e * (4 * 64 + 2 * 200) + 4 * SEQ * 4  # heads, feed-forward, and sums of attention
    assert kept.whole == SEQ * e * 2 * 64  # normalized inputs of attention and feed-forward


def test_the_model_is_not_touched(build_net):
    model = build_net(dropout=0.1)
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    profile(model, sequence_length=SEQ)
    for name, value in model.state_dict(keep_vars=True).items():
        assert (id(value), True) == (before[name][0], bool(torch.equal(value, before[name][1])))
        assert value.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_recomputed_blocks_keep_their_outputs(build_net):
    model = build_net(8)
    found = profile(model, sequence_length=SEQ)
    size = {"global_batch_size": 4, "sequence_length": SEQ}

    def activations(recompute):
        (rank,) = estimate_memory(found, Layout(dp=1, tp=1, pp=1, recompute=recompute), **size)
        return rank.activations

    none, half, every = map(activations, (None, 2, 1))
    block = found.activations.parts[found.activations.order[3]]
    saved = 4 * (block.kept.per_row.total - block.output.per_row.total)
    assert block.output.per_row.total == SEQ * 64 * 4
    assert none - half == 4 * saved
    assert half - every == 4 * saved


def test_every_other_of_three_blocks_is_one(build_net):
    """As `Plan.recompute` names them: the second of three; by another count two would keep nothing."""
    model = build_net(3)
    found = profile(model, sequence_length=SEQ)
    size = {"global_batch_size": 4, "sequence_length": SEQ}
    none, half = (
        estimate_memory(found, Layout(dp=1, tp=1, pp=1, recompute=every), **size)[0].activations for every in (None, 2)
    )
    block = found.activations.parts[found.activations.order[2]]
    assert blocks_of(model, every=2) == ("gpt.blocks.1",)
    assert none - half == 4 * (block.kept.per_row.total - block.output.per_row.total)


def test_dropout_keeps_a_byte_per_element(build_net):
    plain, dropped = (profile(build_net(dropout=p), sequence_length=SEQ).activations for p in (0.0, 0.1))
    kept = [each.parts[each.order[2]].kept.per_row.total for each in (plain, dropped)]
    assert kept[1] - kept[0] == 2 * SEQ * 64


def test_descriptions_of_a_model(build_net):
    model = build_net()
    described = functools.partial(nn.Linear, 4, out_features=8), (nn.Linear, 4, 8), (nn.Linear, 4, {"out_features": 8})
    assert all(build_model(each).weight.is_meta for each in described)
    assert build_model(model) is model
    with pytest.raises(
        TypeError, match=r"build_model: expected an nn\.Module, functools.* config of Hugging Face .* 3"
    ):
        build_model(3)
    with pytest.raises(
        TypeError, match=r"expected a class or function that returns an nn\.Module as model, got one .*int"
    ):
        build_model(functools.partial(int, 3))


def test_given_inputs_and_loss(build_net):
    """Logits alone are summed; with a loss of float64 more is kept."""
    inputs = {"idx": torch.zeros(1, SEQ, dtype=torch.long, device="meta")}
    summed, squared = (
        profile(build_net(), sequence_length=SEQ, inputs=inputs, loss_fn=loss_fn).activations
        for loss_fn in (torch.sum, lambda logits: logits.double().pow(2).sum())
    )
    more = squared.parts[squared.order[-1]].kept.per_row.total - summed.parts[summed.order[-1]].kept.per_row.total
    assert more >= 8 * SEQ * 100
    with pytest.raises(ValueError, match=r"profile: expected inputs and loss_fn with which Net runs .*; correct them"):
        profile(build_net(), sequence_length=SEQ, inputs={"wrong": torch.zeros(1)})


def test_a_model_that_needs_data_is_estimated_and_says_so(build_net):
    class Counting(Net):
        def forward(self, idx, targets=None):
            x = self.gpt.embed(idx)
            x = x * float(x.detach().numpy().sum())
            return super().forward(idx, targets) * x.sum()

    model = Counting(build_net().gpt)
    found = profile(model, sequence_length=SEQ)
    assert found.activations is None
    assert "does not run on tensors without data" in found.notes[-1]
    assert estimate_memory(found, Layout(dp=1, tp=1, pp=1), global_batch_size=2, sequence_length=5)[0].activations > 0


def test_copies_of_a_deferred_model_run(build_net):
    with torch.device("meta"):
        model = copy.deepcopy(build_net())
    assert profile(model.to("meta"), sequence_length=SEQ).activations is not None
