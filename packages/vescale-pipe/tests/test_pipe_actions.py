"""Actions and schedules print as text and parse back."""

import pytest

from vescale.pipe import Action, Schedule, gpipe, one_f_one_b


@pytest.mark.parametrize("text", ["2F0", "1B3", "0I12", "13W4"])
def test_action_prints_as_it_parses(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ,", "-1F0", "2SEND_F0"])
def test_other_text_is_refused_with_the_form(text):
    with pytest.raises(ValueError, match=r"expected an action like '2F0' \(<stage><F\|B\|I\|W><micro-batch>\), got"):
        Action.parse(text)


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match="expected one of F, B, I, W for the kind of an action, got 'X'"):
        Action(0, "X", 0)
    with pytest.raises(ValueError, match="expected stage >= 0 and microbatch >= 0, got stage=-1"):
        Action(-1, "F", 0)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_schedule_prints_as_it_parses(make):
    schedule = make(3, 5)
    assert Schedule.parse(str(schedule)) == schedule


def test_actions_are_frozen():
    with pytest.raises(AttributeError):
        Action(0, "F", 0).stage = 1
