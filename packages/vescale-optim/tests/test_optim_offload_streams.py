"""Copies of offload follow the computation and are waited for, by streams that note what a device would be asked."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale.optim._parameters import offload as _offload
from vescale.optim._parameters.offload import HostMemory
from vescale_testing import ranks


class Streams:
    """Stands for the module of an accelerator: notes, for its streams, what they are asked to do."""

    def __init__(self):
        self.log = []
        self.current = Stream("current", self.log)

    def Stream(self, _device):  # noqa: N802 - as in torch
        return Stream("copies", self.log)

    def current_stream(self, _device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    """Notes calls."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getattr__(self, method):
        return lambda *args: (self.log.append((self.name, method, *[getattr(a, "name", a) for a in args])), "event")[1]


def on_streams(monkeypatch):
    """Return a host memory that believes in streams, and what it asks of them."""
    streams = Streams()
    host = HostMemory(torch.device("cpu"))
    monkeypatch.setattr(_offload.torch, "get_device_module", lambda _device: streams)
    for which in ("_to_device", "_to_host"):
        setattr(host, which, _offload._CopyStream(SimpleNamespace(type="accelerator")))
    return host, streams


def test_copies_follow_the_computation_and_are_waited_for(monkeypatch):
    host, streams = on_streams(monkeypatch)
    home, target = torch.ones(3), torch.zeros(3)
    order = []

    def gather():
        order.append((streams.current.name, target.tolist()))

    awaited = host.bring(target, home, gather)
    assert order == [("copies", [1.0, 1.0, 1.0])]  # on the stream of the copy, and after it
    assert streams.log == [("copies", "wait_stream", "current"), ("copies", "record_event")]
    assert streams.current.name == "current"
    awaited.wait()
    assert streams.log[2:] == [("current", "wait_event", "event")]
    host.wait_before_writing()
    assert streams.log[3:] == [("copies", "synchronize")]
    streams.log.clear()
    value = SimpleNamespace()  # what a stream still reads must not be given to others
    monkeypatch.setattr(home, "copy_", lambda _value, non_blocking: streams.log.append(non_blocking), raising=False)
    value.record_stream = lambda stream: streams.log.append(("value", "record_stream", stream.name))
    host.keep(home, value)
    host.wait_before_reading()
    assert streams.log == [
        ("copies", "wait_stream", "current"),
        True,
        ("value", "record_stream", "copies"),
        ("copies", "synchronize"),
    ]
    pending = SimpleNamespace(wait=lambda: None)
    assert host.bring(target, home, lambda: pending) is pending  # a gather is waited for instead of the copy


@ranks(2)
def test_steps_wait_for_copies_in_both_directions(monkeypatch):
    waits = []
    monkeypatch.setattr(HostMemory, "wait_before_reading", lambda _host: waits.append("gradients"))
    monkeypatch.setattr(HostMemory, "wait_before_writing", lambda _host: waits.append("values"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), mesh["dp"], zero=3, offload=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    loss = model(torch.ones(2, 3)).sum()
    assert waits == []
    loss.backward()
    assert waits == ["gradients"]
    waits.clear()
    optimizer.step()
    assert waits == ["gradients", "values"]
    for write in (lambda: model.load_state_dict(model.state_dict()), model.sharded_parameters):
        waits.clear()
        write()
        assert waits == ["gradients", "values"]
    waits.clear()
    with model.unsharded():
        pass
    assert waits == ["values"] * len(model._sharded.buckets)
    with model.no_sync():
        waits.clear()
        model(torch.ones(2, 3)).sum().backward()
        assert waits == []  # nothing is reduced
