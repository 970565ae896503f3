"""One finding: what was seen, why it matters, what to do."""

from textwrap import TextWrapper
from typing import Any

import msgspec

PAGE = "docs/troubleshooting.md"
WIDTH = 110
"""Characters of a line."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is likely to cost memory, speed or quality."""

    name: str
    """Stable name for programs."""
    title: str
    seen: str
    """The numbers that led to it."""
    why: str
    fix: tuple[str, ...]
    """What to do, the most promising first: flags and commands."""
    anchor: str
    """Section of the troubleshooting page."""

    @property
    def link(self) -> str:
        """Where more is written about it."""
        return f"{PAGE}#{self.anchor}"

    def as_record(self) -> dict[str, Any]:
        """As JSON."""
        record: dict[str, Any] = msgspec.to_builtins(self)
        del record["anchor"]
        return {**record, "link": self.link}

    def as_text(self, number: int) -> str:
        """A few lines."""
        parts = [("seen: ", self.seen), ("why:  ", self.why), *(("do:   ", fix) for fix in self.fix), ("more: ", self.link)]
        # Flags and commands stay whole.
        wrap = TextWrapper(WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False, break_long_words=False)
        filled = [wrap.fill(f"   {name}{text}") for name, text in parts]
        return "\n".join([f"{number}. {self.title}", *filled])
