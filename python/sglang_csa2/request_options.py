"""Options of one request: keys of its `custom_params` that begin with "csa2_".

UPSTREAM(sglang 0.5.23): BEFORE hook of `Scheduler._add_request_to_queue`; SGLang hands `custom_params` through unchecked.
"""

import math
from typing import Any, NamedTuple

from csa2.controller import MAX_RATIO, MIN_RATIO, rungs
from csa2.errors import OptionError
from csa2.facts import NO_CAP
from csa2.formats import FormatLadder
from sglang_csa2 import own_requests

PREFIX = "csa2_"
RATIO = "csa2_ratio"
STATIC = "csa2_static"
"""Key of custom_params, and attribute of a request: others will share the pages of its prompt."""
KEYS = (RATIO, STATIC)
CAP = "csa2_cap"
"""Attribute of a request: the smallest format that its own pages may have."""


class RequestOptions(NamedTuple):
    """Options of one request."""

    ratio: float | None = None
    """Cap of its tail."""
    static: bool = False
    """Whether the pages of its prompt are treated as shared ones."""


def check_params(params: Any) -> RequestOptions:
    """What `custom_params` of a request ask for.

    Raises:
        OptionError: an unknown key of ours, or a value that makes no sense.
    """
    if not isinstance(params, dict):
        return RequestOptions()
    ours = {key: value for key, value in params.items() if isinstance(key, str) and key.startswith(PREFIX)}
    unknown = sorted(set(ours) - set(KEYS))
    if unknown:
        raise OptionError(
            f"custom_params has {_short(unknown[0])}, which does not exist: leave it out, the keys are {' and '.join(KEYS)}"
        )
    static = ours.get(STATIC, False)
    if not isinstance(static, bool):
        raise OptionError(f"custom_params {STATIC} is {_short(static)}: give true or false")
    return RequestOptions(check_ratio(ours[RATIO], f"custom_params {RATIO}") if RATIO in ours else None, static)


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
    if steward is None:
        return
    if own_requests.owner_of(self) is None and steward.guard is not None:
        steward.guard.give_way()
    if hasattr(req, CAP):
        return
    own_requests.before_queue(self, req)
    cap = NO_CAP
    try:
        options = check_params(req.sampling_params.custom_params)
        setattr(req, STATIC, options.static)
        if options.ratio is not None:
            cap = cap_of(options.ratio, steward.store.ladder)
    except OptionError as error:
        req.set_finish_with_abort(str(error))
    setattr(req, CAP, cap)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
