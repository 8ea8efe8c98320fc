"""Modes at run time, for the whole model and for parts of it: all mixes give the same numbers."""

import pytest
import torch

from vescale.dmodule import PlanError, parallelize_module, set_mode
from vescale.dtensor import DTensor, init_device_mesh
from vescale_testing import ranks

CHANGES = [
    ("static", r"layers\.1"),
    ("eager", r"layers\.0\.attention", "embed"),
    ("eager",),
    ("static", r".*\.(up|down)", r"norm", "embed"),
    ("static",),
    ("eager", r"layers\.\d+"),
]


@ranks(2)
def test_modes_change_at_run_time(tiny, in_all_modes):
    """A model that changes its modes gives what one does that stays in eager mode, and what the plain one gives."""
    mesh, ids = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), tiny.ids(2, 7)
    modes = iter(("plain", "eager", "static"))  # in the order of `in_all_modes`

    def program(model):
        found, changes = {}, next(modes) == "static"
        for step, (mode, *parts) in enumerate(CHANGES):
            if changes:
                assert set_mode(model, mode, *parts) is model
            y = model(ids)
            (y.log_softmax(-1).square().sum() / 10).backward()
            found[f"output {step}"] = y.detach()
        with torch.no_grad():
            return found | {f"without {again}": model(ids) for again in range(2)}

    in_all_modes(lambda: tiny(dropout=0.1), tiny.plan(sequence_parallel=True), mesh, program)


@ranks(2)
def test_parts_run_as_they_were_told(tiny):
    mesh, ids, kinds = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), tiny.ids(), {}
    model = parallelize_module(tiny(), mesh, tiny.plan(), mode="static")
    for name, part in model.named_modules():
        if not isinstance(part, torch.nn.ModuleList):
            part.register_forward_pre_hook(lambda _m, args, name=name: kinds.update({name: type(args[0])}) or None)

    def is_on_dtensors():
        model(ids)
        return {name for name, kind in kinds.items() if kind is DTensor}

    set_mode(model, "eager")
    everything = is_on_dtensors()
    first = {name for name in everything if name.startswith("layers.0")}
    second = {name for name in everything if name.startswith("layers.1")}
    assert {"layers.0", "layers.1.attention.q", "head"} < everything
    set_mode(model, "static")
    assert is_on_dtensors() == set()
    set_mode(model, "eager", r"layers\.0")
    assert is_on_dtensors() == first
    set_mode(model, "static", r"layers\.0")
    assert is_on_dtensors() == set()
    set_mode(model, "eager")  # parts keep theirs
    assert is_on_dtensors() == everything - first
    set_mode(model, "eager", r"layers\.0")
    set_mode(model, "static", r"layers\.1", "embed")
    assert is_on_dtensors() == everything - second


@ranks(2)
def test_wrong_modes():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="got a Sequential that is none; call parallelize_module first"):
        set_mode(plain, "static")
    with pytest.raises(ValueError, match="for mode, got 'statik'; did you mean 'static'"):
        parallelize_module(plain, mesh, {}, mode="statik")
    model = parallelize_module(plain, mesh, {})
    with pytest.raises(ValueError, match="for mode, got 'statik'; did you mean 'static'"):
        set_mode(model, "statik")
    with pytest.raises(PlanError, match=r"expected regexes of submodules for parts, got 'layers\\\\.0'; they are 0"):
        set_mode(model, "static", r"layers\.0")
    with pytest.raises(ValueError, match="expected a parallelized module, got a Linear that is none"):
        set_mode(model[0], "static")
