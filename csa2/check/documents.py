"""Texts to measure on that every installation has: what comes with Python and with the packages beside it.

Sources (a module, a package, a topic) are dealt out by a hash of their name to a development set, on which choices may be
made, and a report set, whose figures are published. What the development documents leave of their sources is for
calibration. No paragraph is in two documents.
"""

import ast
import hashlib
import importlib.metadata
import io
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from csa2.check.errors import CheckError

Split = Literal["development", "report", "calibration"]
SPLITS: tuple[Split, ...] = get_args(Split)

CHARACTERS = 30_000
"""Of one document: at least 4700 tokens of code, more of prose."""
SHORTEST_PARAGRAPH = 40
"""Characters below which a paragraph may occur in several documents: headings, rules, single brackets."""


class Document(NamedTuple):
    """One text; `name` says its kind."""

    name: str
    text: str


Source = tuple[str, str]
"""Name of a source and its text."""


def shipped_documents(split: Split, characters: int = CHARACTERS) -> list[Document]:
    """The documents of one split, one of each kind, each `characters` long; those of other splits do not depend on it.

    The same for the same versions of Python and the installed packages.

    Raises:
        CheckError: this installation has too little text of one kind.
    """
    seen: set[str] = set()
    documents = {}
    # Splits are always made in this order, so that none repeats a paragraph of another.
    for each in SPLITS[: max(2, SPLITS.index(split) + 1)]:
        for kind, sources in KINDS.items():
            of_split = "development" if each == "calibration" else each
            wanted = characters if each == split else CHARACTERS
            text = _fill((text for name, text in sources() if _split_of(name) == of_split), wanted, seen)
            if len(text) < wanted:
                raise CheckError(
                    f"this installation has only {len(text)} characters of {kind} for the {each} set, {wanted} are "
                    f"needed: install more packages, or measure on files of your own with --text"
                )
            documents[each, kind] = Document(kind, text)
    return [document for (each, _), document in documents.items() if each == split]


def write_documents(folder: Path, split: Split, characters: int = CHARACTERS) -> list[Path]:
    """Write the documents of one split to `folder`, one file each; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for document in shipped_documents(split, characters):
        path = folder / f"{document.name}.txt"
        path.write_text(document.text, encoding="utf-8")
        paths.append(path)
    return paths


def _split_of(source: str) -> Split:
    return "report" if hashlib.sha256(source.encode()).digest()[0] % 2 else "development"


def _fill(texts: Iterator[str], characters: int, seen: set[str]) -> str:
    """Paragraphs of `texts` that are not in `seen`, joined up to `characters`; `seen` grows."""
    kept: list[str] = []
    length = 0
    for text in texts:
        for paragraph in text.replace("\r\n", "\n").split("\n\n"):
            # Spacing and case aside: licences differ in little else.
            key = " ".join(paragraph.split()).lower()
            if not key or (len(key) >= SHORTEST_PARAGRAPH and key in seen):
                continue
            seen.add(key)
            kept.append(paragraph.strip("\n"))
            length += len(kept[-1]) + 2
            if length > characters + 2:
                return "\n\n".join(kept)[:characters]
    return "\n\n".join(kept)


def _topics() -> Iterator[Source]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", topics[name]


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and sources of the Python files of `folder`, largest first: small ones are mostly tables and imports."""
    paths = sorted(folder.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    for path in paths:
        yield path.stem, path.read_text(encoding="utf-8", errors="replace")


def _stdlib() -> Iterator[tuple[str, str]]:
    return _modules(Path(sysconfig.get_path("stdlib")))


def _docstrings(modules: Iterator[tuple[str, str]], prefix: str) -> Iterator[Source]:
    for name, source in modules:
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
        yield f"{prefix} {name}", "\n\n".join(text for text in found if text)


def _comments() -> Iterator[Source]:
    for name, source in _stdlib():
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        paragraphs: list[list[str]] = []
        last = -1
        for token in tokens:
            if token.type == tokenize.COMMENT:
                if token.start[0] != last + 1:
                    paragraphs.append([])
                last = token.start[0]
                paragraphs[-1].append(token.string.lstrip("#! "))
        yield f"module {name}", "\n\n".join("\n".join(lines) for lines in paragraphs if len(lines) > 2)


def _package_docstrings() -> Iterator[Source]:
    import torch

    folder = Path(torch.__file__).parent
    for part in ("nn/modules", "optim", "distributions"):
        yield from _docstrings(_modules(folder / part), f"torch {part}")


def _distributions() -> list[importlib.metadata.Distribution]:
    found = {distribution.metadata["Name"].lower(): distribution for distribution in importlib.metadata.distributions()}
    return [found[name] for name in sorted(found)]


def _readmes() -> Iterator[Source]:
    for distribution in _distributions():
        # The message's payload: the description since metadata 2.1.
        body = (distribution.read_text("METADATA") or "").partition("\n\n")[2]
        yield f"package {distribution.metadata['Name']}", body


def _licences() -> Iterator[Source]:
    for distribution in _distributions():
        for path in sorted(distribution.files or [], key=str):
            if "dist-info" in path.parts[0] and "licen" in path.name.lower() and path.suffix not in (".py", ".json"):
                located = Path(str(path.locate()))
                if located.is_file():
                    yield f"package {distribution.metadata['Name']}", located.read_text(encoding="utf-8", errors="replace")


KINDS: dict[str, Callable[[], Iterator[Source]]] = {
    "language-reference": _topics,
    "stdlib-docstrings": lambda: _docstrings(_stdlib(), "module"),
    "stdlib-comments": _comments,
    "stdlib-code": lambda: ((f"module {name}", source) for name, source in sorted(_stdlib())),
    "torch-docstrings": _package_docstrings,
    "readmes": _readmes,
    "licences": _licences,
}
"""Where the text of each kind comes from, source by source, in a fixed order."""
