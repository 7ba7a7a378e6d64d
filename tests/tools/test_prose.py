"""The check of English finds each pattern, with its line, and nothing in code."""

from pathlib import Path

import pytest

from tests.tools import prose


@pytest.mark.parametrize(
    "words",
    [
        "what the region does to a tensor.",
        "the norm, that of all gradients",
        "those which overflow",
        "The function is no module.",
        "The policy says it.",
        "Where a device skips, it reads nothing.",
        "an error where there is a cast",
        "a float32 run beside it",
        "a look at the weights, mended",
        "losses that are equal to the bit",
        "tensors in 16 bits",
        "a module in half",
        "weights of bfloat16",
        "in compiled code too.",
        "also in a region",
        "All are read at once",
        "It takes some minutes.",
        "It takes 1.1 of its time",
        "The scale stays",
        "what was left is gone",
        "[The page](page.md) has the figures",
        "in place of a step",
        "the median, else 0",
        "20 % of the steps",
        "a newer torch",
        "uninitialised memory",
        "one; two; three",
    ],
)
def test_a_pattern_is_found(words: str) -> None:
    found = prose.hits("page.md", f"A title\n\nSome text. {words}\n")
    assert [hit.line for hit in found]
    assert {hit.line for hit in found} == {3}


def test_sentences_have_a_longest_length() -> None:
    long = " ".join(["word"] * 41)
    assert [hit.line for hit in prose.hits("page.md", f"One.\n\n{long[:100]}\n{long[101:]}.\n\n| {long} |\n")] == [3]


def test_code_links_and_good_words_are_not_found() -> None:
    page = """# What does it cost?

`what the`, [a link](what-the-policy-says.md), what to do, what if, is no longer, see [policies](policy.md).
<!-- what a comment says -->

```python
what = "it says, in 16 bits"
```
"""
    assert prose.hits("page.md", page) == []


def test_docstrings_and_comments_are_checked_and_code_is_not() -> None:
    source = '''"""It says so."""

what = "it tells"  # what it is.
other = 1  # a name; another

def run():
    """Return it.

    That of a tensor.
    """
    # A comment that goes on
    # over two lines, and asks.
'''
    found = prose.hits("a.py", prose.of_python(source))
    assert [(hit.line, hit.words) for hit in found] == [
        (1, "says"), (3, "what it"), (9, "That of"), (11, "goes on"), (12, "asks")
    ]  # fmt: skip


def test_the_command_prints_the_hits_of_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    for name, text in {"good.md": "All is well.", "new.md": "It tells you.", "code.py": "x = 1  # it knows"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(prose, "files", lambda: sorted(tmp_path.iterdir()))
    assert prose.main([]) == 1
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == ["code.py:1", "new.md:1"]
    assert prose.main([str(tmp_path / "good.md")]) == 0
