"""The book of pinned documents, and what may be asked for."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csa2.documents import DocumentBody, DocumentBook, check_id, read_body, whole_pages
from csa2.errors import DocumentConflictError, DocumentError, UnknownDocumentError

TOKENS = (1, 2, 3, 4)


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_body() -> None:
    assert read_body(body(id="a", text="t")) == DocumentBody("a", text="t")
    asked = read_body(body(id="a", input_ids=[1, 2], format="fp8", ttl=5, extra_key="k"))
    assert (asked.input_ids, asked.format, asked.ttl, asked.extra_key) == ([1, 2], "fp8", 5.0, "k")
    assert read_body(body(id="a", messages=[{"role": "user", "content": "x"}])).messages is not None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the body is no document"),
        (b"text", "the body is no document"),
        (b"\xff", "the body is no document"),
        (b"[" * 5000, "the body is no document"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `id`"),
        (body(id=1, text="t"), "Expected `str`, got `int` - at `$.id`"),
        (body(id=None, text="t"), "at `$.id`"),
        (body(id="a", text=["t"]), "at `$.text`"),
        (body(id="a", messages="t"), "at `$.messages`"),
        (body(id="a", messages=["t"]), "at `$.messages[0]`"),
        (body(id="a", input_ids=[1.5]), "at `$.input_ids[0]`"),
        (body(id="a", input_ids=[True]), "at `$.input_ids[0]`"),
        (body(id="a", text="t", format=8), "at `$.format`"),
        (body(id="a", text="t", ttl="1h"), "at `$.ttl`"),
        (body(id="a", text="t", more=1), "unknown field `more`"),
        (body(id="a"), "this one has none of them"),
        (body(id="a", text="t", input_ids=[1]), "this one has text and input_ids"),
        (body(id="a", text=""), "text is empty"),
        (body(id="a", input_ids=[]), "input_ids is empty"),
        (body(id="a", messages=[]), "messages is empty"),
        (body(id="a", text="t", ttl=0), "ttl is 0: give seconds"),
        (body(id="a", text="t", ttl=-3), "ttl is -3"),
        (b'{"id": "a", "text": "t", "ttl": 1e300}', "ttl is 1e"),
        (b'{"id": "a", "text": "t", "ttl": NaN}', "the body is no document"),
        (body(id="a", text="t", extra_key="k" * 600), "extra_key has 600 characters"),
        (body(id="../etc/passwd", text="t"), "id '../etc/passwd' is not allowed"),
    ],
)
def test_a_body_that_makes_no_sense(raw: bytes, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read_body(raw)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["a", "A1", "report-2024_v1.2", "x" * 128])
def test_ids(name: str) -> None:
    check_id(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "a/b", "a\\b", "a b", "a\n", "a%2e", "\u00e4", "x" * 129, "x" * 10**6, "a\0"]
)
def test_ids_with_tricks(name: str) -> None:
    with pytest.raises(DocumentError, match="is not allowed") as caught:
        check_id(name)
    assert len(str(caught.value)) < 300


def test_whole_pages() -> None:
    assert whole_pages(list(range(10)), 4, 100, 10) == tuple(range(8))
    for tokens, message in (
        ([1, 2], "less than one page"),
        ([0] * 11, "more than the longest"),
        ([100] * 4, "100 does not"),
    ):
        with pytest.raises(DocumentError, match=message):
            whole_pages(tokens, 4, 100, 10)


def test_the_same_content_is_known() -> None:
    book = DocumentBook()
    document = book.add("a", TOKENS, None, "fp8", None, 1)
    assert book.known("a", TOKENS, None, "fp8") is document
    assert book.known("b", TOKENS, None, "fp8") is None
    for other in (((9, 9), None, "fp8"), (TOKENS, "k", "fp8"), (TOKENS, None, "fp4")):
        with pytest.raises(DocumentConflictError, match="'a' exists with other content"):
            book.known("a", *other)


def test_one_that_failed_makes_way() -> None:
    book = DocumentBook()
    document = book.add("a", TOKENS, None, "fp8", None, 1)
    document.state = "failed"
    assert book.known("a", (9, 9), None, "fp8") is None
    later = book.add("a", (9, 9), None, "fp8", None, 2)
    assert later in book
    assert document not in book
    assert len(book) == 1


def test_a_late_removal_leaves_a_later_document() -> None:
    book = DocumentBook()
    first = book.add("a", TOKENS, None, "fp8", 1.0, 1)
    book.remove("a")
    second = book.add("a", TOKENS, None, "fp8", None, 2)
    with pytest.raises(UnknownDocumentError, match="'a' is number 2, not 1"):
        book.remove("a", [first.serial])
    assert book.get("a") is second
    assert book.remove("a", [first.serial, second.serial]) is second
    for call in (book.get, book.remove):
        with pytest.raises(UnknownDocumentError, match="there is no document 'a'"):
            call("a")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_the_book_is_a_dictionary_in_order(steps: list[tuple[str, bool]]) -> None:
    book, model = DocumentBook(), {}
    for serial, (name, adds) in enumerate(steps):
        if adds and name not in model:
            model[name] = book.add(name, TOKENS, None, "fp8", None, serial)
        elif not adds and name in model:
            assert book.remove(name) is model.pop(name)
        assert list(book) == list(model.values())
        assert len(book) == len(model)
