"""The text that a model is looked at with: windows, columns, documents, suffixes, bytes and syntax."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_ffn.data.prepare import DataConfig
from moe_ffn.data.tokenizer import BytesConfig, train_bpe
from moe_ffn.report.inspect import text as text_module
from moe_ffn.report.inspect import text_of_tokens
from moe_ffn.report.inspect.text import (
    BYTE_CLASSES,
    SYNTAX_CLASSES,
    TokenizedText,
    syntax_of,
    text_of_file,
)

BYTES = BytesConfig().build([])


def tokens_of(*documents: bytes) -> np.ndarray:
    ids = [np.append(BYTES.encode(document), BYTES.end_of_document) for document in documents]
    return np.concatenate(ids)


def read(
    *documents: bytes, seq_len: int = 8, num_tokens: int = 10**6, **options: Any
) -> TokenizedText:
    return text_of_tokens(tokens_of(*documents), BYTES, seq_len, num_tokens, **options)


def test_windows_are_spread_evenly_and_know_what_follows() -> None:
    text = read(bytes(range(65, 65 + 26)), seq_len=4, num_tokens=9)

    assert text.windows.tolist() == [
        list(range(65, 69)),
        list(range(74, 78)),
        list(range(83, 87)),
    ]
    assert text.next_T.reshape(-1, 4)[:, -1].tolist() == [69, 78, 87]
    assert text.position_T.tolist() == [0, 1, 2, 3] * 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mine.py", ""), ("mine.txt", "the name of 'mine.txt' does not end in .py")],
)
def test_a_file_is_python_by_its_name(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x = 1\n")
    run: Any = SimpleNamespace(tokenizer=BYTES, config=SimpleNamespace(data=DataConfig(seq_len=8)))

    text = text_of_file(run, tmp_path / name, 8)

    assert (text.no_syntax, text.syntax_T is None) == (reason, bool(reason))


def test_a_text_shorter_than_a_sequence_is_one_window() -> None:
    assert read(b"abc", seq_len=100).windows.tolist() == [list(b"abc")]


def test_columns_count_from_the_start_of_the_line_across_windows_and_not_across_documents() -> None:
    text = read(b"ab\nlong line", b"x\ny", seq_len=4)

    rows = text.column_T.reshape(-1, 4).tolist()
    shown = ["".join(map(text.token, row.tolist())) for row in text.windows]
    assert dict(zip(shown, rows, strict=True)) == {
        r"ab\nl": [0, 1, 2, 0],
        "ng␣l": [2, 3, 4, 5],
        r"e<end>x\n": [8, 9, 0, 1],
    }


def test_documents_have_the_names_of_what_they_hold() -> None:
    names = {hashlib.sha256(b"second").hexdigest(): "b.py"}
    text = read(b"first one", b"second", seq_len=5, names=names)
    assert text.documents == ("document 0", "b.py")
    assert text.document_T.reshape(-1, 5).tolist() == [[0] * 5, [0, 0, 1, 1, 1]]


def test_a_document_too_long_to_read_is_read_around_its_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = b"x = 1\n" * 40
    whole = read(source, seq_len=16, num_tokens=64)
    monkeypatch.setattr(text_module, "MAX_DOCUMENT", 32)
    parts = read(source, seq_len=16, num_tokens=64)

    assert parts.column_T.tolist() == whole.column_T.tolist()
    assert whole.syntax_T is not None
    assert parts.syntax_T is not None
    assert set(parts.syntax_T) == {SYNTAX_CLASSES.index("unknown")}
    assert SYNTAX_CLASSES.index("number") in whole.syntax_T


def test_suffixes_are_equal_where_the_last_tokens_are_and_the_window_holds_them() -> None:
    text = read(b"abcab" + b"cabc", seq_len=4)
    first, second, third = text.suffixes(3)

    assert text.windows.tolist() == [list(b"abca"), list(b"cabc")]
    assert first.tolist() == list(b"abcacabc")
    bc = [2, 7]  # "bc" and "abc" end there in both windows
    assert second[bc[0]] == second[bc[1]]
    assert third[bc[0]] == third[bc[1]]
    assert second[1] == second[6]
    assert third[1] != third[6], "the first window holds no 'cab'"
    assert len({*second[[0, 4]].tolist()}) == 2, "a window's first token has no suffix of two"


def test_byte_classes() -> None:
    text = read("a1 \n(é\t_".encode(), seq_len=9)
    classes = [BYTE_CLASSES[c] for c in text.byte_class_T]
    assert classes == [
        *("letter", "digit", "space", "newline", "punctuation", "non-ASCII", "non-ASCII"),
        *("space", "punctuation"),
    ]


def test_the_first_nonspace_byte_decides_the_class_of_a_token() -> None:
    bpe = train_bpe([b" def def def def  def 12 12 12 12"] * 50, 512)
    ids = np.append(bpe.encode(b"x def 12"), bpe.end_of_document)
    text = text_of_tokens(ids, bpe, 100, 100)

    assert text.syntax_T is not None
    classes = zip(text.ids_T, text.byte_class_T, text.syntax_T, strict=True)
    found = {text.token(i): (BYTE_CLASSES[b], SYNTAX_CLASSES[s]) for i, b, s in classes}
    assert found["␣def"] == ("letter", "keyword")
    assert found["␣12"][0] == "digit"


SOURCE = b'''def f(x):
    """Doc."""
    return x + 1  # why

'''


def test_syntax_is_that_of_python_s_own_tokenizer() -> None:
    found = [SYNTAX_CLASSES[c] for c in syntax_of(SOURCE)]

    def of(part: bytes) -> set[str]:
        start = SOURCE.index(part)
        return set(found[start : start + len(part)])

    assert of(b"def") == of(b"return") == {"keyword"}
    assert of(b"f(") == {"name", "operator"}
    assert of(b'"""Doc."""') == {"string"}
    assert of(b'    """') == {"indentation", "string"}
    assert of(b"1") == {"number"}
    assert of(b"# why") == {"comment"}
    assert of(b" +") == {"space", "operator"}
    assert found[-1] == "newline"
    assert len(found) == len(SOURCE)


def test_syntax_counts_bytes_where_characters_are_longer() -> None:
    source = 'é = "ü" + 1\n'.encode()
    found = [SYNTAX_CLASSES[c] for c in syntax_of(source)]
    assert found[:2] == ["name", "name"]
    assert found[source.index(b"1")] == "number"
    assert found[source.index(b'"') : source.index(b'"') + 4] == ["string"] * 4


@pytest.mark.parametrize(
    "source",
    [
        *(b"x = (1\n", b"if x:\n        y\n    z\n", b"\xff\xfe", b"", b"'''never ends", b"\x00"),
        b"a\rb\r\nc",
    ],
)
def test_syntax_is_unknown_after_invalid_python(source: bytes) -> None:
    found = syntax_of(source)
    assert len(found) == len(source)
    if source.startswith(b"x"):
        assert SYNTAX_CLASSES[found[0]] == "name"


def test_a_text_without_syntax_keeps_the_reason() -> None:
    text = read(b"Once upon a time.", no_syntax="this is prose")
    assert text.syntax_T is None
    assert text.no_syntax == "this is prose"
