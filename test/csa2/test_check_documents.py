"""Texts that come with Python, as development and report set."""

import itertools

import pytest

from csa2.check import documents
from csa2.check.documents import KINDS, SHORTEST_PARAGRAPH, shipped_documents, write_documents
from csa2.check.errors import CheckError


@pytest.fixture(scope="module")
def both():
    return {split: shipped_documents(split) for split in ("development", "report")}


def paragraphs(text):
    keys = (" ".join(paragraph.split()).lower() for paragraph in text.split("\n\n"))
    # The last one may be cut.
    return {key for key in list(keys)[:-1] if len(key) >= SHORTEST_PARAGRAPH}


def test_each_set_has_every_kind_in_full(both):
    for found in both.values():
        assert [document.name for document in found] == list(KINDS)
        assert len(found) >= 6
        assert {len(document.text) for document in found} == {documents.CHARACTERS}


def test_no_paragraph_is_in_two_documents(both):
    every = [paragraphs(document.text) for found in both.values() for document in found]
    for left, right in itertools.combinations(every, 2):
        assert not left & right


def test_documents_are_the_same_every_time(both):
    assert shipped_documents("report") == both["report"]


def test_documents_are_written_as_files(tmp_path, both):
    paths = write_documents(tmp_path / "texts", "development")
    assert [path.read_text(encoding="utf-8") for path in paths] == [document.text for document in both["development"]]


def test_too_little_text_is_an_error():
    with pytest.raises(CheckError, match=r"characters of .* for the development set"):
        shipped_documents("development", characters=10**9)
