"""Formats that can be checked, and the cache options under which old pages take them.

A row of the report is named after its format, and after its variant where that is not the one that serves by default:
"csa2-4x", "csa2-4x (separated)".
"""

from collections.abc import Sequence
from typing import Any

from csa2.check.errors import CheckError
from csa2.formats import MERGE
from csa2.options import CacheOptions

PLAIN_FORMAT = "bf16"
"""Nothing is compressed: what is left is the arithmetic of the other attention backend, the noise floor of the others."""

_OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN_FORMAT: {"tail_format": "bf16"},
    "fp8": {"tail_format": "fp8"},
    "k8v4": {"tail_format": "k8v4"},
    "fp4": {"ratio": "1", "kv_format": "fp4"},
    "int4": {"ratio": "1", "kv_format": "int4"},
    "csa2-2x": {"ratio": "2"},
    "csa2-4x": {"ratio": "4"},
    "csa2-8x": {"ratio": "8"},
}
_ALWAYS = {"shared_format": "tail"}
"""The check finds its own text in the prefix cache, step after step; its pages must not count as shared ones."""

DEFAULT_VARIANT = CacheOptions().rope
FORMATS = tuple(_OPTIONS)
CALIBRATED = ("k8v4", "fp4", "int4", *MERGE)
"""Formats that use a calibration."""


def row_name(page_format: str, variant: str) -> str:
    """The name of the row of a format in a variant."""
    return page_format if variant == DEFAULT_VARIANT else f"{page_format} ({variant})"


def split_name(name: str) -> tuple[str, str]:
    """Format and variant of a row: the inverse of `row_name`."""
    page_format, _, rest = name.partition(" (")
    return page_format, rest.removesuffix(")") or DEFAULT_VARIANT


def with_variant(formats: Sequence[str], variant: str) -> tuple[str, ...]:
    """Names of the rows: every format, and beside it `variant` of those that have one."""
    names = ([name, row_name(name, variant)] if name != PLAIN_FORMAT else [name] for name in formats)
    return tuple(dict.fromkeys(name for pair in names for name in pair))


def cache_options(name: str) -> CacheOptions:
    """The options that store old private pages as the row `name` says.

    Raises:
        CheckError: no such format.
    """
    return CacheOptions(**_fields(name))


def engine_options(name: str, calibration: str | None = None) -> dict[str, Any]:
    """The same as fields of the server arguments, those alone that differ from the defaults.

    Args:
        calibration: folder from `csa2 calibrate`, used by the formats that can.

    Raises:
        CheckError: no such format.
    """
    fields = _fields(name)
    if calibration is not None and split_name(name)[0] in CALIBRATED:
        fields["calibration"] = calibration
    return {f"csa2_{field}": value for field, value in fields.items()}


def parse_formats(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list, each once and in order.

    Raises:
        CheckError: one of them does not exist, or there is none.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise CheckError(f"--formats {text!r} names no format: choose from {', '.join(FORMATS)}")
    for name in names:
        if name not in FORMATS:
            raise _unknown(name)
    return names


def _fields(name: str) -> dict[str, Any]:
    page_format, variant = split_name(name)
    if page_format not in _OPTIONS:
        raise _unknown(name)
    rope = {} if variant == DEFAULT_VARIANT else {"rope": variant}
    return {**_OPTIONS[page_format], **_ALWAYS, **rope}


def _unknown(name: str) -> CheckError:
    return CheckError(f"--formats {name!r} is unknown: choose from {', '.join(FORMATS)}")
