"""Peak memory of materialize, measured: a rank holds its shards and a bounded scratch, never the model."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vescale.dtensor import Shard, deferred_init, init_device_mesh, materialize
from vescale.dtensor.extension import leaves
from vescale_testing import ranks

PIECE = 4 * 2**17  # bytes of one piece of float32: what a fill draws at a time
ROWS, COLUMNS = 2048, 1024
WEIGHT = 4 * ROWS * COLUMNS  # bytes of one parameter: two pieces


class LiveBytes(TorchDispatchMode):
    """Watches every operator; `peak` is the largest sum of bytes of storages that were alive after one."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in leaves(result):
            if type(tensor) is torch.Tensor and not tensor.is_meta:  # wrappers such as DTensor own nothing
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._storages.values()))
        return result


class Blocks(nn.Module):
    """Weights that the constructor initializes, and that an `_init_weights` then initializes again."""

    def __init__(self, init, count=6, rows=ROWS):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, rows, bias=False) for _ in range(count))
        for layer in self.layers:
            init(layer.weight)


def padded_normal(weight):
    nn.init.normal_(weight, 0.0, 0.02)
    with torch.no_grad():
        weight[3].zero_()


def peak_of(ctor, placements):
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    with LiveBytes() as live:
        module = deferred_init(ctor)
        recording = live.peak
        materialize(module, mesh, placements)
    return recording, live.peak


def test_the_measure_sees_an_eager_constructor():
    with LiveBytes() as live:
        eager = Blocks(padded_normal)
    assert live.peak >= 6 * WEIGHT
    del eager


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_random_fills_hold_the_shards_and_one_piece(dim):
    recording, peak = peak_of(lambda: Blocks(padded_normal), lambda *_: [Shard(dim)])
    assert recording < 2**16, "recording allocated parameters"
    shards = 6 * WEIGHT // 4
    assert peak <= shards + PIECE + 2**16, (peak, shards)


@ranks(4)
def test_a_change_of_dtype_holds_both_shards_of_one_parameter():
    _, peak = peak_of(lambda: Blocks(padded_normal).to(torch.float64), lambda *_: [Shard(0)])
    shards_fp64 = 2 * 6 * WEIGHT // 4
    shards_fp32 = 6 * WEIGHT // 4  # all parameters are initialized before the first one is converted
    assert peak <= shards_fp64 + shards_fp32 + PIECE + 2**16


@ranks(4)
def test_initializers_on_whole_tensors_hold_one_tensor_at_a_time():
    """The loop of `trunc_normal_` needs its tensor, the redraw, their mixture and masks: less than four tensors."""

    def init(weight):
        nn.init.trunc_normal_(weight, 0.0, 0.5)

    recording, peak = peak_of(lambda: Blocks(init, count=16, rows=ROWS // 4), lambda *_: [Shard(0)])
    weight, shards = WEIGHT // 4, 16 * WEIGHT // 4 // 4
    piece = min(weight, PIECE)
    assert recording <= 4 * weight + piece + 2**18
    assert peak <= shards + 4 * weight + piece + 2**18
    assert peak < 16 * weight


@ranks(4)
def test_parameters_of_other_stages_cost_nothing():
    def ctor():
        return Blocks(padded_normal)

    mesh = init_device_mesh("cpu", (4,))
    module = deferred_init(ctor)
    for index in range(1, 6):
        module.layers[index] = nn.Identity()
    with LiveBytes() as live:
        materialize(module, mesh, lambda *_: [Shard(0)])
    assert live.peak <= WEIGHT // 4 + PIECE + 2**16
