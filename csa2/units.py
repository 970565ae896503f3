"""Byte counts as people write them."""

import re

from csa2.errors import OptionError

_FACTOR = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MAX_BYTES = 2**60
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int, option: str = "size") -> int:
    """Number of bytes in `text`: "188MB" is decimal, "180MiB" and "180M" are binary, no suffix is bytes.

    Raises:
        OptionError: not a positive size; names `option`.
    """
    match = _SIZE.fullmatch(str(text))
    suffix = match.group(2).lower() if match else ""
    if suffix == "b":
        suffix = ""
    value = float(match.group(1)) * _FACTOR[suffix] if match and suffix in _FACTOR else 0.0
    if not 1 <= value <= _MAX_BYTES:
        raise OptionError(
            f"{option} {text!r} is not a size: write a positive number of bytes, with a suffix if you like "
            f"(KB, MB, GB = powers of 1000; K, M, G, KiB, MiB, GiB = powers of 1024), for example 4GiB"
        )
    return int(value)


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` with a binary unit and three significant digits (four from 1000 to 1023), for log lines."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{_short(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{_short(num_bytes)} TiB"


def _short(number: float) -> str:
    # `.3g` turns to exponents where three digits no longer reach the unit.
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
