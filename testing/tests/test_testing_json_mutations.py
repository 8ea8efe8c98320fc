"""`check_reader` finds a reader that lets another error through, or that reads a changed text as something else."""

import json

import pytest

from vescale_testing.json_mutations import Mutation, check_reader, mutations

TEXT = json.dumps({"name": "a", "sizes": [1, 2]})


def strict(text):
    """Return the tree of a text that has the form of `TEXT`."""
    try:
        tree = json.loads(text)
        sizes = tree["sizes"]
        fits = tree.keys() == {"name", "sizes"} and type(tree["name"]) is str and type(sizes) is list
        if fits and all(type(size) is int for size in sizes):
            return tree
    except (ValueError, TypeError, LookupError, AttributeError):
        pass
    raise ValueError("expected a name and sizes, got another text")


def test_a_strict_reader_passes():
    assert check_reader(TEXT, strict, json.dumps, error=ValueError, max_examples=100) > 200


def without_a_check(text):
    return {"name": json.loads(text)["name"], "sizes": [1, 2]}


def converting(text):
    return strict(text.replace("true", "1"))


@pytest.mark.parametrize(
    ("read", "message"), [(without_a_check, "expected ValueError, got TypeError"), (converting, "reads as")]
)
def test_a_lax_reader_is_found(read, message):
    with pytest.raises(AssertionError, match=message):
        check_reader(TEXT, read, json.dumps, error=ValueError, max_examples=10)


def test_a_mutation_changes_one_node_and_leaves_the_tree():
    tree = json.loads(TEXT)
    assert Mutation(("sizes", 1), "drop").apply(tree) == {"name": "a", "sizes": [1]}
    assert Mutation(("sizes",), "add", 3).apply(tree) == {"name": "a", "sizes": [1, 2, 3]}
    assert Mutation((), "replace", None).apply(tree) is None
    assert Mutation(("gone", 0), "drop").apply(tree) == tree == json.loads(TEXT)
    assert Mutation(("sizes", 0), "replace", 3).apply({"sizes": {"b": 1}}) == {"sizes": {"b": 1}}  # no longer a list
    assert len(list(mutations(tree))) > 100
