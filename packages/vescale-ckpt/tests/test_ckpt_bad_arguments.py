"""A bad argument is named where it was given: what was expected, what came, and what to pass."""

import dataclasses
import inspect
import re

import pytest
import torch

import vescale.ckpt as public
from vescale.ckpt import (
    PerRank,
    WeightRule,
    diff,
    latest,
    load,
    load_dcp,
    load_hf,
    read_manifest,
    save,
    save_dcp,
    save_hf,
    verify,
    wait,
)
from vescale_testing.bad_arguments import Call, check_calls, check_table

ROWS = {
    "save, path": (lambda _: save(None, {}), "save: expected str or PathLike for path, got None"),
    "save, state": (lambda path: save(path / "a", None), "expected a dict of names to models"),
    "save, metadata": (
        lambda path: save(path / "a", {}, metadata=[1]),
        "expected Mapping or None for metadata, got",
    ),
    "save, metadata keys": (lambda path: save(path / "a", {}, metadata={"a": {1}}), "expected metadata to be a JSON"),
    "save, progress": (
        lambda path: save(path / "a", {}, progress=3),
        "save: expected bool or Callable for progress, got 3",
    ),
    "load, progress": (
        lambda path: load(path / "step", {}, progress="yes"),
        "load: expected bool or Callable for progress, got 'yes'",
    ),
    "load, path": (lambda _: load(3, {}), "load: expected str or PathLike for path, got 3"),
    "load, state": (lambda path: load(path / "step", None), "expected a dict of names to models"),
    "load, ignore": (lambda path: load(path / "step", {}, ignore=3), "expected Collection for ignore, got 3"),
    "load, ignore, text": (lambda path: load(path / "step", {}, ignore="a"), "expected Collection for ignore, got 'a'"),
    "save_dcp, folder": (lambda _: save_dcp(3, {}), "save_dcp: expected str or PathLike for folder, got 3"),
    "save_dcp, state": (lambda path: save_dcp(path / "a", None), "expected a dict of names to models"),
    "save_dcp, overwrite": (
        lambda path: save_dcp(path / "a", {}, overwrite=1),
        "save_dcp: expected bool for overwrite, got 1",
    ),
    "load_dcp, folder": (lambda _: load_dcp(None, {}), "load_dcp: expected str or PathLike for folder, got None"),
    "load_dcp, allow_pickle": (
        lambda path: load_dcp(path / "step", {}, allow_pickle="yes"),
        "load_dcp: expected bool for allow_pickle, got 'yes'",
    ),
    "load_dcp, ignore": (
        lambda path: load_dcp(path / "step", {}, ignore="a"),
        "load_dcp: expected Collection for ignore, got 'a'",
    ),
    "load_dcp, rename": (
        lambda path: load_dcp(path / "step", {}, rename={"a": 1}),
        "load_dcp: expected str for rename['a'], got 1",
    ),
    "diff, path": (lambda _: diff(None, "a"), "diff: expected str or PathLike for path, got None"),
    "diff, other": (lambda path: diff(path / "step", 3), "diff: expected str or PathLike for other, got 3"),
    "read_manifest": (lambda _: read_manifest(None), "read_manifest: expected str or PathLike for path, got None"),
    "read_manifest, NUL": (
        lambda _: read_manifest("a\0b"),
        "expected a checkpoint, got embedded null byte",
    ),
    "save, keep_last": (
        lambda path: save(path / "a-1", {}, keep_last=0),
        "save: expected an integer of 1 or more for keep_last, got 0",
    ),
    "save, keep_last without a number": (
        lambda path: save(path / "best", {}, keep_last=1),
        "expected a name with a number at its end for keep_last, such as 'step-100', got 'best'",
    ),
    "latest": (lambda _: latest(3), "latest: expected str or PathLike for directory, got 3"),
    "load_hf, folder": (lambda _: load_hf(3, linear()), "load_hf: expected str or PathLike for folder, got 3"),
    "load_hf, module": (lambda path: load_hf(path / "hf", {}), "load_hf: expected Module for module, got {}"),
    "load_hf, rules": (
        lambda path: load_hf(path / "hf", linear(), rules=["a"]),
        "load_hf: expected WeightRule for rules[0], got 'a'",
    ),
    "save_hf, folder": (lambda _: save_hf(None, linear()), "save_hf: expected str or PathLike for folder, got None"),
    "save_hf, module": (lambda path: save_hf(path / "a", 3), "save_hf: expected Module for module, got 3"),
    "save_hf, max_shard_bytes": (
        lambda path: save_hf(path / "a", linear(), max_shard_bytes=0),
        "save_hf: expected an integer of 1 or more for max_shard_bytes, got 0",
    ),
    "WeightRule, no pattern": (lambda _: WeightRule([], "a"), "expected a pattern for file and one for module"),
    "WeightRule, several": (
        lambda _: WeightRule(["a", "b"], ["c", "d"], concatenate=0),
        "expected one pattern for file or for module, got 2 and 2; write a rule for each",
    ),
    "WeightRule, no dim": (lambda _: WeightRule(["a", "b"], "c"), "expected concatenate= for several patterns"),
    "WeightRule, a dim": (lambda _: WeightRule("a", "c", concatenate=0), "got 0 for 1 of file and 1 of module"),
    "WeightRule, fields": (
        lambda _: WeightRule("a.{x}", "c.{y}"),
        "expected equal fields in the patterns",
    ),
    "WeightRule, no number": (lambda _: WeightRule("a.{x}", "c.{x}", stack=0), "got [] for stack=0"),
    "WeightRule, a number": (lambda _: WeightRule("a.{x}.{n}", "c.{x}"), "got ['n'] for stack=None"),
    "WeightRule, stack of several": (
        lambda _: WeightRule("a.{n}", ["c", "d"], stack=0, concatenate=0),
        "expected one pattern for module to stack, got 2",
    ),
    "verify": (lambda _: verify(3), "verify: expected str or PathLike for path, got 3"),
}


RESULTS = (
    "Box",
    "Difference",
    "Layout",
    "Loop",
    "Manifest",
    "Piece",
    "Run",
    "StoredFile",
    "StoredTensor",
    "TensorMeta",
)  # of planning and of manifests
LISTS = {"()", "[]", "[text]", "{}", "{text: 0}", "longer", "shorter"}


def linear():
    return torch.nn.Linear(2, 2)


def state():
    return {"weight": torch.ones(2, 3), "step": 1, "names": ["a"], "model": torch.nn.Linear(2, 2)}


def calls():
    """Return the public calls."""
    arguments = {
        "path": "step",
        "state": state(),
        "metadata": {"note": "a", "values": [1, 2.0]},
        "overwrite": True,
        "keep_last": None,
        "check_replicas": True,
        "async_": False,
        "progress": False,
        "process_group": None,
    }
    loaded = {
        "state": state(),
        "strict": True,
        "ignore": ("optimizer",),
        "rename": {"w": "w"},
        "allow_dtype_cast": False,
        "process_group": None,
    }
    return {
        "load": Call(
            load,
            lambda: {**loaded, "path": "step", "state": state(), "progress": False},
            {"ignore": LISTS, "rename": {"None", "{}"}, "progress": {"True"}},
        ),
        "load_dcp": Call(
            load_dcp,
            lambda: {**loaded, "folder": "dcp", "state": state(), "allow_pickle": True},
            {"ignore": LISTS, "rename": {"None", "{}"}},
        ),
        "read_manifest": Call(read_manifest, lambda: {"path": "step"}),
        "latest": Call(
            latest, lambda: {"directory": ".", "process_group": None}, {"directory": {"text", "misspelled"}}
        ),
        "diff": Call(lambda path: diff(path, "step"), lambda: {"path": "step"}),
        "PerRank": Call(
            lambda resize: PerRank(0, resize),
            lambda: {"resize": None},
            {"resize": {"None", "class", "function", "module"}},
        ),
        "verify": Call(verify, lambda: {"path": "step"}),
        "wait": Call(wait, dict),
        "load_hf": Call(
            load_hf,
            lambda: {
                "folder": "hf",
                "module": linear(),
                "rules": (),
                "strict": True,
                "ignore": ("optimizer",),
                "rename": {"w": "w"},
                "allow_dtype_cast": False,
                "process_group": None,
            },
            {"ignore": LISTS, "rename": {"None", "{}"}, "rules": {"None", "()", "[]"}},
        ),
        "WeightRule": Call(
            WeightRule,
            lambda: {"file": "{a}.{n}.w", "module": "{a}.w", "stack": 0, "concatenate": None},
            {"file": {"misspelled"}, "module": {"misspelled"}},
        ),
        "save": Call(
            save,
            lambda: {**arguments, "path": "other", "state": state()},
            {
                "path": {"text", "misspelled"},
                "state": {"{}", "{text: 0}", "{0: 0}", "another key"},
                "metadata": {"None", "{}", "{text: 0}", "another key"},
                "progress": {"True"},
            },
        ),
        "save_dcp": Call(  # after `save`, which makes a checkpoint of the other path
            save_dcp,
            lambda: {"folder": "dcp-2", "state": state(), "overwrite": True, "process_group": None},
            {"folder": {"misspelled"}, "state": {"{}", "{text: 0}", "{0: 0}", "another key"}},
        ),
        "save_hf": Call(
            lambda folder, module, rules, max_shard_bytes, overwrite: save_hf(
                folder, module, rules=rules, max_shard_bytes=max_shard_bytes, overwrite=overwrite
            ),
            lambda: {
                "folder": "other_hf",
                "module": linear(),
                "rules": (),
                "max_shard_bytes": 1000,
                "overwrite": True,
            },
            {"folder": {"text", "misspelled"}, "module": {"module"}, "rules": {"None", "()", "[]"}},
        ),
    }


def test_the_table_has_every_public_name():
    check_table({"": public}, calls(), RESULTS)


def test_bad_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("step", state())
    save_dcp("dcp", state())
    save_hf("hf", linear())
    assert check_calls(calls()) > 800


def test_a_function_without_its_checks_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("step", state())
    call = calls()["read_manifest"]
    bare = dataclasses.replace(call, function=inspect.unwrap(call.function))
    with pytest.raises(AssertionError, match=r"\d+ calls end badly"):
        check_calls({"read_manifest": bare})


@pytest.mark.parametrize("row", ROWS)
def test_refused(tmp_path, row):
    save(tmp_path / "step", {"a": 1})
    save_hf(tmp_path / "hf", linear())
    call, message = ROWS[row]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call(tmp_path)
