"""The pages in docs/ run: their blocks of Python in order, and what a block prints is what the page says."""

import re
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fuser import Registration

ROOT = Path(__file__).parents[1]
# Pages that need what a user may not have, and where it runs.
HUGGING_FACE = (
    pytest.mark.hf,
    pytest.mark.rest,
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="transformers 5 is not installed here, so the page cannot run."
    ),
)
MARKS = {"hugging_face.md": HUGGING_FACE}
PAGES = [
    pytest.param(page, marks=MARKS.get(page.name, ()), id=page.name) for page in sorted((ROOT / "docs").glob("*.md"))
]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_page(text: str, name: str) -> int:
    """Execute the ```python blocks in one namespace, and return how many there were.

    What a block prints must be the ```text block that follows it; a block that prints nothing is followed by none.
    """
    namespace: dict[str, Any] = {"__name__": name}
    blocks = [(match[1], match[2], text.count("\n", 0, match.start(2))) for match in BLOCK.finditer(text)]
    try:
        for (language, code, line), (next_language, expected, _) in pairwise([*blocks, ("", "", 0)]):
            if language == "python":
                with redirect_stdout(StringIO()) as printed:
                    # Empty lines in front, so that a traceback gives the line of the page.
                    exec(compile("\n" * line + code, name, "exec"), namespace)
                assert printed.getvalue() == (expected if next_language == "text" else ""), f"{name}, line {line + 1}"
    finally:
        # A page that stops half-way must not leave its fusions, or its process group, to the tests behind it.
        for value in namespace.values():
            if isinstance(value, Registration):
                value.unregister()
        if dist.is_initialized():
            dist.destroy_process_group()
    return sum(language == "python" for language, _, _ in blocks)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_and_print_what_it_says(page, monkeypatch):
    monkeypatch.chdir(ROOT)  # where docs/benchmarks.md reads bench/results
    assert run_page(page.read_text(), str(page)) > 0


RIGHT = (
    "# Page\n\n```python\na = 1\n```\n\nText.\n\n```python\nprint(a)\n```\n\n```text\n1\n```\n\n```\nmake demo\n```\n"
)


def test_blocks_share_a_namespace():
    assert run_page(RIGHT, "page") == 2


@pytest.mark.parametrize(
    ("given", "changed", "line"),
    [
        ("```text\n1", "```text\n2", 10),
        ("```text\n1\n```\n", "", 10),
        ("a = 1\n```", "a = 1\n```\n```text\n1\n```", 4),
    ],
    ids=["another output", "an output that the page leaves out", "an output that never was"],
)
def test_a_page_that_is_wrong_about_its_output_is_found(given, changed, line):
    with pytest.raises(AssertionError, match=f"page, line {line}"):
        run_page(RIGHT.replace(given, changed), "page")


def test_an_error_gives_the_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as error_info:
        run_page(RIGHT.replace("a = 1", "a = 1 / 0"), "page")
    assert error_info.traceback[-1].lineno == 3
