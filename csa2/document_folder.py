"""Documents in a folder: `--csa2-documents`."""

from pathlib import Path

import msgspec

from csa2.documents import DocumentBody, read_body
from csa2.errors import DocumentError, OptionError
from csa2.units import format_bytes

MAX_DOCUMENT_BYTES = 8 * 2**20
"""Of a file, and of a request for a document."""
TEXT_SUFFIXES = (".txt", ".md")
MESSAGES_SUFFIX = ".json"


def read_folder(folder: str) -> list[DocumentBody]:
    """The documents of a folder, in the order of their names: *.txt and *.md as text, *.json as messages.

    The name of a file without its ending is the id. Other files and folders inside are left alone.

    Raises:
        OptionError: no such folder, no document in it, or one that is none.
    """
    path = Path(folder)
    if not path.is_dir():
        raise OptionError(
            f"--csa2-documents {folder} is no folder: give one with *.txt, *.md or *.json files, or leave it out"
        )
    files = sorted(f for f in path.iterdir() if f.is_file() and f.suffix in (*TEXT_SUFFIXES, MESSAGES_SUFFIX))
    if not files:
        raise OptionError(f"--csa2-documents {folder} has no *.txt, *.md or *.json file: put some there, or leave it out")
    seen: dict[str, Path] = {}
    for file in files:
        if file.stem in seen:
            raise OptionError(
                f"--csa2-documents {folder} has {seen[file.stem].name} and {file.name}, both with the id {file.stem!r}"
            )
        seen[file.stem] = file
    return [_read_file(file) for file in files]


def _read_file(file: Path) -> DocumentBody:
    size = file.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        raise OptionError(
            f"--csa2-documents: {file} has {format_bytes(size)}, more than {format_bytes(MAX_DOCUMENT_BYTES)}: split it"
        )
    try:
        if file.suffix == MESSAGES_SUFFIX:
            content = {"messages": msgspec.json.decode(file.read_bytes(), type=list[dict[str, object]])}
            return read_body(msgspec.json.encode({"id": file.stem, **content}))
        return read_body(msgspec.json.encode({"id": file.stem, "text": file.read_text(encoding="utf-8")}))
    except (DocumentError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OptionError(f"--csa2-documents: {file} is no document: {error}") from error
