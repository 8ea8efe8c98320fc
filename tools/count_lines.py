"""Count the lines of code that one program has beyond another.

    python tools/count_lines.py PLAIN PARALLEL [--show]      # prints: 17 lines beyond PLAIN

What counts is a line that holds code: blank lines, comments and docstrings do not. Lines are compared by their tokens,
so that spacing and comments make no difference; a changed line counts as one. A statement over several lines counts as
many, as its author wrote it: so format both programs alike before (`ruff format`).
"""

import ast
import difflib
import io
import sys
import tokenize
from pathlib import Path

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> list[str]:
    """Return the lines of a program that hold code, each as its tokens separated by spaces, with its indentation."""
    documentation = _documentation(source)
    tokens: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or token.start[0] in documentation:
            continue
        first = token.start[0]
        for number, text in enumerate(token.string.split("\n"), first):  # a string may go over several lines
            tokens.setdefault(number, []).append(text.strip())
    lines = source.splitlines()
    indentation = {number: lines[number - 1][: -len(lines[number - 1].lstrip())] for number in tokens}
    return [indentation[number] + " ".join(tokens[number]) for number in sorted(tokens) if any(tokens[number])]


def _documentation(source: str) -> set[int]:
    """Return the numbers of the lines of docstrings."""
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                numbers |= set(range(first.lineno, first.end_lineno + 1))
    return numbers


def lines_beyond(plain: str, parallel: str) -> list[str]:
    """Return the lines of code of a program that another does not have, in order.

    Args:
        plain: source of the program that is there anyway.
        parallel: source of the program that was made of it.
    """
    before, after = code_lines(plain), code_lines(parallel)
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    return [line for tag, _, _, start, end in matcher.get_opcodes() if tag != "equal" for line in after[start:end]]


def main(arguments: list[str]) -> None:
    """Print the number of lines of the second program beyond the first, and with --show the lines."""
    paths = [argument for argument in arguments if argument != "--show"]
    if len(paths) != 2:
        sys.exit("usage: python tools/count_lines.py PLAIN PARALLEL [--show]")
    plain, parallel = (Path(path).read_text(encoding="utf-8") for path in paths)
    beyond = lines_beyond(plain, parallel)
    if "--show" in arguments:
        print("\n".join(beyond))
    print(f"{len(beyond)} lines beyond {paths[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
