"""Options of one request: keys of its `custom_params` that begin with "csa2_".

UPSTREAM(sglang 0.5.23): BEFORE hook of `Scheduler._add_request_to_queue`; SGLang hands `custom_params` through unchecked.
"""

import math
from typing import Any

from csa2.controller import MAX_RATIO, MIN_RATIO, rungs
from csa2.errors import OptionError
from csa2.facts import NO_CAP
from csa2.formats import FormatLadder

PREFIX = "csa2_"
RATIO = "csa2_ratio"
CAP = "csa2_cap"
"""Attribute of a request: the smallest format that its own pages may have."""


def check_params(params: Any) -> float | None:
    """The ratio that `custom_params` cap the request's tail at, or None.

    Raises:
        OptionError: an unknown key of ours, or a value that is no ratio.
    """
    if not isinstance(params, dict):
        return None
    ours = {key: value for key, value in params.items() if isinstance(key, str) and key.startswith(PREFIX)}
    unknown = sorted(set(ours) - {RATIO})
    if unknown:
        raise OptionError(f"custom_params has {unknown[0]!r}, which does not exist: leave it out, the key is {RATIO!r}")
    return None if RATIO not in ours else check_ratio(ours[RATIO], f"custom_params {RATIO}")


def check_ratio(value: Any, name: str) -> float:
    """`value` as a ratio.

    Raises:
        OptionError: it is no number from 1 to 8.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not MIN_RATIO <= value <= MAX_RATIO:
        raise OptionError(f"{name} is {_short(value)}: give a number from {MIN_RATIO:g} to {MAX_RATIO:g}, for example 2")
    return float(value)


def cap_of(ratio: float, ladder: FormatLadder) -> int:
    """The smallest format of `ladder` that is no smaller than `ratio` says."""
    return max(index for rung, index in rungs(ladder) if rung <= ratio)


def before_add_request_to_queue(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Take the options of a request; one that makes no sense ends with status 400."""
    steward = getattr(self, "csa2_steward", None)
    if steward is None or hasattr(req, CAP):
        return
    cap = NO_CAP
    try:
        ratio = check_params(req.sampling_params.custom_params)
        if ratio is not None:
            cap = cap_of(ratio, steward.store.ladder)
    except OptionError as error:
        req.set_finish_with_abort(str(error))
    setattr(req, CAP, cap)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
