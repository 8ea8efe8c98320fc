"""Lines of code are counted as a reader would, and only those that a program has beyond another."""

import pytest
from count_lines import code_lines, lines_beyond, main

PLAIN = '''"""A program."""

import torch


def train(model):
    """Train it."""
    # nothing to say
    return model(torch.ones(1))
'''


def test_blank_lines_comments_and_docstrings_are_no_code():
    assert code_lines(PLAIN) == ["import torch", "def train ( model ) :", "    return model ( torch . ones ( 1 ) )"]


def test_a_string_over_several_lines_is_code():
    assert len(code_lines('TEXT = """one\n\n# two\n"""\n')) == 3


def test_spacing_comments_and_documentation_are_no_difference():
    other = PLAIN.replace("A program", "Another").replace("(torch.ones(1))", "( torch . ones( 1 ) )  # one")
    assert lines_beyond(PLAIN, "# first\n\n" + other) == []


@pytest.mark.parametrize(
    "old, new, number",
    [
        ("import torch\n", "import torch\nimport vescale\n", 1),
        ("return model(torch.ones(1))", "return model(torch.ones(2))", 1),
        ("    return model", "    model.train()\n    return model", 1),
        ("    return model(torch.ones(1))", "    if model:\n        return model(torch.ones(1))", 2),
        ("torch.ones(1)", "\n        torch.ones(1),\n    ", 3),
        ("import torch\n", "", 0),
    ],
    ids=["added", "changed", "inside", "indented", "over several lines", "removed"],
)
def test_lines_beyond(old, new, number):
    assert old in PLAIN
    assert len(lines_beyond(PLAIN, PLAIN.replace(old, new))) == number


def test_the_number_and_the_lines_are_printed(tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("plain.py", "parallel.py")]
    for path, text in zip(paths, (PLAIN, PLAIN + "\nprint(train)\n"), strict=True):
        with open(path, "w") as file:
            file.write(text)
    main([*paths, "--show"])
    assert capsys.readouterr().out == f"print ( train )\n1 lines beyond {paths[0]}\n"
