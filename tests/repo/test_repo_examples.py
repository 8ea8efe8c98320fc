"""The runner of Markdown examples finds every block, runs it at its own line numbers and reports a failure."""

import pytest
import run_examples
from run_examples import blocks, programs, run

PAGE = """# Title

```python
x = 1
```

```console
rm -rf /
```

```python
assert x == {value}
```

````text
```python
never run
```
````
"""


@pytest.fixture
def page(tmp_path):
    def write(text):
        path = tmp_path / "page.md"
        path.write_text(text)
        return path

    return write


def test_plain_blocks_of_a_page_are_one_program(page):
    (program,) = programs(page(PAGE.format(value=1)))
    assert [line for line in program.lines if line] == ["x = 1", "assert x == 1"]
    run(program)


def test_a_failing_example_names_the_line_of_the_page(page):
    (program,) = programs(page(PAGE.format(value=2)))
    with pytest.raises(RuntimeError, match="exit status 1") as caught:
        run(program)
    assert f"line {PAGE.splitlines().index('assert x == {value}') + 1}" in str(caught.value)


def test_options_make_programs_of_their_own(page):
    path = page("```python\na = 1\n```\n```python torchrun=4\nb = 2\n```\n```python gpu\nc = 3\n```\n")
    plain, four, gpu = programs(path)
    assert (plain.num_processes, four.num_processes, gpu.num_processes) == (0, 4, 0)
    assert (plain.needs_gpu, four.needs_gpu, gpu.needs_gpu) == (False, False, True)
    assert [line for line in four.lines if line] == ["b = 2"]
    assert four.first_line == 5


def test_an_unknown_option_is_refused(page):
    with pytest.raises(ValueError, match="unknown option 'no-run'; use 'torchrun=N' or 'gpu'"):
        programs(page("```python no-run\nx\n```\n"))


def test_a_block_that_is_never_closed_is_refused():
    with pytest.raises(ValueError, match="opened in line 2 is never closed"):
        blocks("text\n```python\nx = 1\n")


def test_a_page_without_python_has_no_program(page):
    assert programs(page("```console\nls\n```\n```python\n\n```\n")) == []


def test_an_example_that_hangs_is_ended(page, monkeypatch):
    monkeypatch.setattr(run_examples, "TIMEOUT_SECONDS", 0.5)
    (program,) = programs(page("```python\nprint('before', flush=True)\nimport time\ntime.sleep(60)\n```\n"))
    with pytest.raises(RuntimeError, match=r"page.md:2: not finished after 0.5 s\nbefore"):
        run(program)
