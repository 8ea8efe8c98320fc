"""A module that cannot be recorded on the rows of all ranks: DDP says what it does not check."""

import logging

from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, init_device_mesh
from vescale.optim import DDP
from vescale_testing import ranks


def texts_of(make):
    """Return the warnings of a function."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("vescale.optim")
    logger.addHandler(handler)
    make()
    logger.removeHandler(handler)
    return [record.getMessage() for record in records]


def model(mesh, *, whole):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = {"forward": {"input": [Replicate()]}}
    parallelize_module(net if whole else net[0], mesh["tp"], plan)
    return net


@ranks(4)
def test_a_module_that_cannot_be_recorded():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    (text,) = texts_of(lambda: DDP(model(mesh, whole=False), mesh["dp"]))
    assert "DDP cannot record Sequential on the rows of all ranks" in text
    assert "pass per_rank=True if that is what you want" in text
    assert texts_of(lambda: DDP(model(mesh, whole=True), mesh["dp"])) == []
    assert texts_of(lambda: DDP(model(mesh, whole=False), mesh["dp"], per_rank=True)) == []
