"""Actions and schedules print as text and parse back."""

import pytest

from vescale.pipe import Action, Overlap, Schedule, dual_pipe_v, gpipe, lower, one_f_one_b, zb_v


@pytest.mark.parametrize("text", ["2F0", "1B3", "0I12", "13W4", "0SEND_F3", "1RECV_B10", "2UNSHARD", "0REDUCE_GRAD"])
def test_action_prints_as_it_parses(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ,", "-1F0", "2SEND_F", "2UNSHARD0", "(0F1)OVERLAP_F_B"])
def test_other_text_is_refused_with_the_form(text):
    with pytest.raises(ValueError, match=r"expected an action like '2F0' \(<stage><F\|B\|I\|W><micro-batch>\), got"):
        Action.parse(text)


def test_bad_fields_are_refused():
    with pytest.raises(
        ValueError, match=r"expected one of F, B, I, W, SEND_F, .*, REDUCE_GRAD for the kind of .*, got 'X'"
    ):
        Action(0, "X", 0)
    with pytest.raises(ValueError, match="expected stage >= 0 and microbatch >= 0, got stage=-1"):
        Action(-1, "F", 0)
    with pytest.raises(TypeError, match="expected integers for stage and microbatch, got stage=0, microbatch=None"):
        Action(0, "F", None)
    with pytest.raises(ValueError, match="expected no micro-batch for UNSHARD, which is of a whole stage, got 1"):
        Action(0, "UNSHARD", 1)
    with pytest.raises(ValueError, match="expected a forward F and a backward B or I, got B and F"):
        Overlap(Action(0, "B", 0), Action(1, "F", 1))
    with pytest.raises(ValueError, match=r"expected different micro-batches or stages, got .0F1;0B1.OVERLAP_F_B"):
        Overlap(Action(0, "F", 1), Action(0, "B", 1))


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, dual_pipe_v, lambda p, m: lower(zb_v(p, m), unshard=True)])
def test_schedule_prints_as_it_parses(make):
    schedule = make(3, 5)
    assert Schedule.parse(str(schedule)) == schedule


def test_actions_are_frozen():
    with pytest.raises(AttributeError):
        Action(0, "F", 0).stage = 1
