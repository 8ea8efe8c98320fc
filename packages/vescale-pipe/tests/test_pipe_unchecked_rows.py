"""Without a package that rehearses calls, a warning says once that nobody looks for what mixes rows."""

import importlib.metadata
import logging

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import ranks


@pytest.mark.parametrize(("num_stages", "num_microbatches", "warns"), [(2, 1, True), (1, 4, True), (1, 1, False)])
@ranks(2)
def test_a_warning_says_what_is_not_checked(num_stages, num_microbatches, warns):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("vescale.pipe").addHandler(handler)
    importlib.metadata.entry_points = lambda **_: ()
    mesh = init_device_mesh("cpu", (2 // num_stages, num_stages), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=num_microbatches))
    texts = [record.getMessage() for record in records if "whether the model mixes rows" in record.getMessage()]
    assert len(texts) == (warns and mesh["pp"].get_local_rank() == 0), dist.get_rank()
