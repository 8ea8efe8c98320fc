"""`check_calls` finds errors from inside, calls that do not end, and bad values that are accepted."""

import contextlib
import types

import pytest
import torch

from vescale_testing import bad_arguments
from vescale_testing.bad_arguments import VALUES, Call, check_calls, check_table

OWN = __name__.split(".")[0]


def careful(count, *names, mode="a"):
    """Refuse what is no positive number below 100, no string, and no known mode."""
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 100:
        raise ValueError(f"expected a positive number below 100 for count, got {count!r}")
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"expected strings as names, got {names!r}")
    if mode not in ("a", "b"):
        raise ValueError(f"expected 'a' or 'b' for mode, got {mode!r}")


RIGHT = {"count": 1, "names": ("x",), "mode": "a"}
ACCEPTED = {"names": ("()", "no text", "text", "longer", "shorter")}


def test_a_careful_function_passes():
    assert check_calls({"careful": Call(careful, lambda: RIGHT, ACCEPTED)}, package=OWN) > 3 * len(VALUES) - 8


def test_what_is_not_listed_as_right_is_found():
    with pytest.raises(AssertionError, match=r"careful.names is accepted\n    2: longer, shorter$"):
        check_calls({"careful": Call(careful, lambda: RIGHT, {"names": ("()", "no text", "text")})}, package=OWN)
    accepted = ACCEPTED | {"mode": ("text",)}
    with pytest.raises(AssertionError, match=r"careful.mode is listed as right, but refused: ValueError"):
        check_calls({"careful": Call(careful, lambda: RIGHT, accepted)}, package=OWN)


TENSOR = torch.ones(2)


def bare(value):
    return value.shape


def of_python(value):
    return len(value)


def endless(value):
    while value != 0:
        pass


def of_torch(value):
    torch.nn.functional.relu(value) if isinstance(value, torch.Tensor) else torch.ones(2).expand(value)


def without_a_name(value):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"expected a tensor, got {value!r}")


def careless_inside(value):
    if not isinstance(value, dict) or "a" not in value:
        raise TypeError(f"expected a dict for value, got {value!r}")
    value["a"].strip()


@pytest.mark.parametrize(
    ("function", "right", "message"),
    [
        (bare, TENSOR, r"bare.value no ValueError or TypeError, but AttributeError of .*\n.*: None, "),
        (of_python, [1], r"of_python.value not raised by a statement of the package: TypeError of .*: object of type"),
        (endless, 0, r"endless.value no ValueError or TypeError, but _EndlessError of .*: the call did not end"),
        (of_torch, TENSOR, r"of_torch.value no ValueError or TypeError, but RuntimeError|TypeError"),
        (without_a_name, TENSOR, r"without_a_name.value the text lacks \['value'\]: TypeError"),
        (careless_inside, {"a": "b"}, r"AttributeError of .*\n.*: \['a'\]=None, \['a'\]=True"),
    ],
)
def test_careless_functions_are_found(monkeypatch, function, right, message):
    monkeypatch.setattr(bad_arguments, "PATIENCE", 0.01)
    accepted = {"value": ("another dtype", "another shape", "tensor", "integers")} if right is TENSOR else {}
    with pytest.raises(AssertionError, match=message):
        check_calls({function.__name__: Call(function, lambda: {"value": right}, accepted)}, package=OWN)


def test_an_error_of_another_package_is_found():
    with pytest.raises(AssertionError, match=r"careful.count not raised by a statement of the package: ValueError"):
        check_calls({"careful": Call(careful, lambda: RIGHT, ACCEPTED)}, package="vescale")


@contextlib.contextmanager
def refusing_when_entered(value):
    if value not in ("a", "ax"):
        raise ValueError(f"expected 'a' for value, got {value!r}")
    yield


def test_contexts_are_entered():
    calls = {"entered": Call(refusing_when_entered, lambda: {"value": "a"}, {"value": ("misspelled",)})}
    assert check_calls(calls, package=OWN) == len(VALUES)  # refused when entered, not when made


def test_the_table_is_complete():
    right = {"careful": Call(careful, lambda: {"count": 1})}
    with pytest.raises(AssertionError, match=r"careful: the table has \['count'\], the function \['count', 'mode'"):
        check_calls(right, package=OWN)
    with pytest.raises(AssertionError, match=r"careful with right arguments: ValueError"):
        check_calls({"careful": Call(careful, lambda: RIGHT | {"count": 0})}, package=OWN)
    module = types.ModuleType("module")
    module.__all__, module.careful, module.Result = ["careful", "Result"], careful, type("Result", (), {})
    check_table({"": module}, right, ["Result"])
    with pytest.raises(AssertionError, match=r"without a call: \['Result'\]"):
        check_table({"": module}, right, [])
    with pytest.raises(AssertionError, match=r"not public: \['gone'\]"):
        check_table({"": module}, right, ["Result", "gone"])
    with pytest.raises(AssertionError, match=r"in both: \['careful'\]"):
        check_table({"": module}, right, ["Result", "careful"])
