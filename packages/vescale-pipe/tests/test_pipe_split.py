"""Modules are assigned to stages by names and identities alone."""

import pytest
import torch
from torch import nn

from vescale.pipe import PipelinePlan, SplitError, split_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class Blocks(nn.Module):
    """The layout of a Hugging Face decoder: modules before, in and after the list of blocks, and a rotary table."""

    def __init__(self, num_layers):
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(8, 4)
        self.model.drop = nn.Dropout(0.0)
        self.model.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.model.norm = nn.LayerNorm(4)
        self.model.rotary = nn.Module()
        self.model.rotary.register_buffer("table", torch.ones(4))
        self.head = nn.Linear(4, 8)


class Flat(nn.Module):
    """Named modules, no list of blocks."""

    def __init__(self):
        super().__init__()
        for name in ("down1", "down2", "middle", "up2", "up1"):
            setattr(self, name, nn.Linear(4, 4))
        self.act = nn.ReLU()


def stages(model, num_stages, split="uniform"):
    return [" ".join(units) for units in split_units(model, PipelinePlan(split=split), num_stages).stages]


def test_uniform_split_of_a_decoder():
    assert stages(Blocks(4), 2) == [
        "model.embed model.layers.0 model.layers.1",
        "model.layers.2 model.layers.3 model.norm head",
    ]


@pytest.mark.parametrize(
    "num_layers, num_stages, counts",
    [(4, 1, [4]), (5, 2, [3, 2]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2]), (9, 4, [2, 3, 2, 2]), (11, 4, [3, 3, 3, 2])],
)
def test_remainder_goes_to_the_middle_then_to_the_first_stage(num_layers, num_stages, counts):
    split = split_units(Blocks(num_layers), PipelinePlan(), num_stages)
    assert [sum("layers" in unit for unit in units) for units in split.stages] == counts


def test_names_that_begin_stages():
    assert stages(Blocks(4), 3, ["model.layers.1", "model.norm"]) == [
        "model.embed model.layers.0",
        "model.layers.1 model.layers.2 model.layers.3",
        "model.norm head",
    ]
    assert stages(Flat(), 2, ["up2"]) == ["down1 down2 middle", "up2 up1"]


def test_a_name_inside_a_block_opens_the_block():
    assert stages(Blocks(2), 2, ["model.layers.1.inner.1"]) == [
        "model.embed model.layers.0 model.layers.1.inner.0",
        "model.layers.1.inner.1 model.layers.1.inner.2 model.norm head",
    ]


def test_lists_of_names_in_any_order():
    assert stages(Flat(), 2, [["up1", "down1"], ["down2", "middle", "up2"]]) == ["down1 up1", "down2 middle up2"]


def test_a_listed_module_list_means_its_entries():
    split = [["model.embed", "model.layers"], ["model.norm", "head"]]
    assert stages(Blocks(2), 2, split) == ["model.embed model.layers.0 model.layers.1", "model.norm head"]


def test_stage_of_and_text():
    split = split_units(Flat(), PipelinePlan(split=["up2"]), 2)
    assert split.stage_of("up1") == 1
    assert str(split) == "stage 0: down1 down2 middle\nstage 1: up2 up1"
    with pytest.raises(KeyError):
        split.stage_of("act")


def test_a_sequential_is_a_list_of_blocks_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert stages(model, 3) == ["0", "2", "4"]


def test_parameters_on_meta_are_enough():
    with torch.device("meta"):
        model = Blocks(2)
    assert stages(model, 2) == ["model.embed model.layers.0", "model.layers.1 model.norm head"]


def check_refused(model, num_stages, split, match):
    with pytest.raises(SplitError, match=match):
        split_units(model, PipelinePlan(split=split), num_stages)


def test_fewer_blocks_than_stages():
    check_refused(
        Blocks(2),
        4,
        "uniform",
        "expected at least 4 blocks for 4 pipeline stages, got 2 in `model.layers`; use a pipeline degree of at most 2",
    )


def test_no_blocks_for_a_uniform_split():
    check_refused(Flat(), 2, "uniform", "expected a ModuleList or Sequential of blocks, got none in Flat; name")


def test_wrong_number_of_starts():
    check_refused(Flat(), 3, ["up2"], r"expected 2 modules .* for 3 stages, got 1: \['up2'\]; name the")


def test_starts_out_of_order():
    check_refused(Flat(), 3, ["up2", "down2"], "expected `down2` after `up2` in the model, got an empty stage")
    check_refused(Flat(), 2, ["down1"], "expected `down1` after `down1` in the model, got an empty stage")


def test_unknown_name_with_the_nearest():
    check_refused(Flat(), 2, ["midle"], "got `midle`, which is not in the model; nearest names: middle")
    check_refused(Flat(), 2, ["act"], "`act`, which has no parameters")


def test_a_module_that_no_stage_lists():
    check_refused(Flat(), 2, [["down1", "down2"], ["up2", "up1"]], "expected `middle` in one .*, got no stage")


def test_a_module_that_two_stages_list():
    split = [["down1", "down2", "middle"], ["middle", "up2", "up1"]]
    check_refused(Flat(), 2, split, r"expected `middle` in one stage's list, got stages \[0, 1\]")


def test_wrong_number_of_lists():
    check_refused(Flat(), 3, [["down1"], ["up1"]], "expected 3 lists in split=.* of the plan, .*, got 2")


def test_a_stage_without_modules():
    split = [["down1", "down2", "middle", "up2", "up1"], []]
    check_refused(Flat(), 2, split, r"stage 1: expected modules with parameters .*, got \[\]")


def test_a_parameter_held_by_a_container():
    model = Blocks(2)
    model.model.position = nn.Parameter(torch.zeros(4))
    check_refused(model, 2, "uniform", "got `model.position` held directly by container `model`.*move it into its")
    model = Blocks(2)
    model.scales = nn.ParameterList([nn.Parameter(torch.zeros(4))])
    check_refused(model, 2, "uniform", "got `scales.0` held directly by container `Blocks`")


def test_a_tied_parameter_on_one_stage_is_accepted():
    model = Blocks(2)
    model.head.weight = model.model.embed.weight
    stage_0 = ["model.embed", "model.layers.0", "head"]
    assert stages(model, 2, [stage_0, ["model.layers.1", "model.norm"]])
