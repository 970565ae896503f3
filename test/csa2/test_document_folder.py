"""--csa2-documents: what a folder may hold."""

from pathlib import Path

import pytest

from csa2 import document_folder
from csa2.document_folder import read_folder
from csa2.errors import OptionError


def test_texts_and_messages_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("B \u00e4")
    (tmp_path / "a.md").write_text("# A")
    (tmp_path / "c.json").write_text('[{"role": "system", "content": "C"}]')
    (tmp_path / "d.pdf").write_text("no")
    (tmp_path / "e.txt").mkdir()
    found = read_folder(str(tmp_path))
    assert [(d.id, d.text) for d in found] == [("a", "# A"), ("b", "B \u00e4"), ("c", None)]
    assert found[2].messages == [{"role": "system", "content": "C"}]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no *.txt"),
        ({"a.pdf": b"x"}, "has no *.txt"),
        ({"a.txt": b"x", "a.md": b"y"}, "a.md and a.txt, both with the id 'a'"),
        ({"a b.txt": b"x"}, "id 'a b' is not allowed"),
        ({"a.txt": b"\xff\xfe"}, "a.txt is no document"),
        ({"a.txt": b""}, "text is empty"),
        ({"a.json": b"{"}, "a.json is no document"),
        ({"a.json": b'{"role": "user"}'}, "Expected `array`"),
        ({"a.json": b"[]"}, "messages is empty"),
        ({"a.txt": b"x" * 2000}, "more than"),
    ],
)
def test_what_is_no_document_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], message: str
) -> None:
    monkeypatch.setattr(document_folder, "MAX_DOCUMENT_BYTES", 1000)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError) as caught:
        read_folder(str(tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="missing is no folder"):
        read_folder(str(tmp_path / "missing"))
