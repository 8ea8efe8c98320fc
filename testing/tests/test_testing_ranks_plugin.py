"""What the plugin adds to pytest, seen from outside, and that `ranks` works without it."""

import pytest
import torch

pytest_plugins = ["pytester"]

HEADER = "import pytest, time, torch.distributed as dist\nfrom vescale_testing import ranks\n"
PLUGIN = ("-p", "vescale_testing.plugin")


@pytest.fixture
def run(pytester):
    """Return a function that runs pytest on the source of a test file."""

    def run_source(source, *options, plugin=PLUGIN):
        pytester.makepyfile(HEADER + source)
        return pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider", "--strict-markers", *options)

    return run_source


@pytest.mark.parametrize("plugin", [PLUGIN, ("-p", "no:vescale_testing.plugin")], ids=["with", "without"])
def test_every_outcome_is_reported_with_and_without_the_plugin(run, plugin):
    source = """
@ranks(2)
def test_passes(): pass
@ranks(2)
def test_fails(): assert dist.get_rank() == 0
@ranks(2)
def test_skips(): pytest.skip("reason to skip")
@ranks(2)
def test_expects_to_fail(): pytest.xfail("reason to fail")
@pytest.mark.xfail(raises=AssertionError, strict=True)
@ranks(2)
def test_is_marked_to_fail(): assert False
@pytest.mark.parametrize("n", [1, 2])
@ranks(2)
def test_has_parameters(n): assert n
"""
    result = run(source, "-rs", plugin=plugin)
    result.assert_outcomes(passed=3, failed=1, skipped=1, xfailed=2)
    result.stdout.fnmatch_lines(["*reason to skip*"])
    result.stdout.fnmatch_lines(["rank 1: AssertionError: assert 1 == 0*(1 of 2 ranks failed)"])
    result.stdout.no_fnmatch_line("*All traceback entries are hidden*")


def test_output_of_the_ranks_is_shown_with_a_failure(run):
    result = run("@ranks(2)\ndef test_talks():\n    print('hello')\n    assert False\n")
    result.stdout.fnmatch_lines(["*Captured stdout call*", "[[]rank 0[]] hello", "[[]rank 1[]] hello"])


def test_the_option_sets_the_time_out_of_tests_that_name_none(run):
    sleeper = "\ndef test_sleeps(): time.sleep(1.5)\n"
    run("@ranks(1)" + sleeper, "--ranks-timeout", "0.5").assert_outcomes(failed=1)
    run("@ranks(1)" + sleeper).assert_outcomes(passed=1)
    run("@ranks(1, timeout=30)" + sleeper, "--ranks-timeout", "0.5").assert_outcomes(passed=1)


def test_rank_tests_can_be_selected(run):
    source = "@ranks(1)\ndef test_a(): pass\ndef test_b(): pass\n"
    run(source, "-m", "ranks").assert_outcomes(passed=1, deselected=1)
    run(source, "-m", "not ranks").assert_outcomes(passed=1, deselected=1)


def test_gpu_tests_are_skipped_with_a_reason_where_there_is_no_gpu(run, monkeypatch):
    source = "@pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): pass\n"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run(source, "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*needs a CUDA device, and there is none*"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run(source).assert_outcomes(passed=2)


def test_the_caller_has_one_thread(run):
    run("import torch\ndef test_a(): assert torch.get_num_threads() == 1\n").assert_outcomes(passed=1)
