"""Asking a server: two readings some seconds apart, and how it was started."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from csa2.doctor.calibration import calibration_fault
from csa2.doctor.metrics import Metrics
from csa2.doctor.readings import Case, Load, Reading
from csa2.info import fetch, fetch_stats

LOAD_INTERVAL_S = 1.0
KEY_NEEDED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


@dataclass
class Observation:
    """A case, and what could not be looked at, with the reason."""

    case: Case
    model: str | None
    """Folder or name of the model that is served now."""
    unseen: list[str] = field(default_factory=list)


def observe(url: str, seconds: float, sleep: Callable[[float], None] = time.sleep) -> Observation:
    """Read the server at `url` for `seconds`.

    Raises:
        OptionError: `url` is not an http address.
        ServerStatsError: it does not answer, or not with statistics.
    """
    first_stats = msgspec.to_builtins(fetch_stats(url))
    unseen: list[str] = []
    arguments = _json(url, "/server_info", unseen) or {}
    served = _json(url, "/model_info", unseen) or {}
    model = served.get("model_path") or arguments.get("model_path")
    documents = (_json(url, "/csa2/documents", unseen) or {}).get("documents", [])
    first = Reading(first_stats, _metrics(url, unseen))
    loads = _loads(url, seconds, unseen, sleep)
    last = Reading(msgspec.to_builtins(fetch_stats(url)), _metrics(url, []))
    case = Case(
        first=first,
        last=last,
        seconds=seconds,
        loads=tuple(loads),
        arguments=arguments,
        documents=tuple(documents),
        calibration_fault=_calibration(last.stats["options"].get("calibration"), model, unseen),
    )
    return Observation(case, model, unseen)


def _loads(url: str, seconds: float, unseen: list[str], sleep: Callable[[float], None]) -> list[Load]:
    """Readings of /v1/loads over `seconds`, the first and the last included."""
    loads = []
    for number in range(max(1, round(seconds / LOAD_INTERVAL_S)) + 1):
        if number:
            sleep(seconds / max(1, round(seconds / LOAD_INTERVAL_S)))
        answer = _json(url, "/v1/loads", unseen if number == 0 else [])
        if answer is not None:
            loads.append(Load.of(answer))
    return loads


def _metrics(url: str, unseen: list[str]) -> Metrics | None:
    status, body = fetch(url, "/metrics")
    if status == HTTPStatus.OK:
        return Metrics(body.decode(errors="replace"))
    unseen.append(
        "times to the first token, lengths of prompts, retractions: start the server with --enable-metrics"
        if status == HTTPStatus.NOT_FOUND
        else f"/metrics answers with HTTP {status}"
    )
    return None


def _json(url: str, path: str, unseen: list[str]) -> dict[str, Any] | None:
    """The JSON object at a path, or None, with the reason in `unseen`."""
    status, body = fetch(url, path)
    if status in KEY_NEEDED:
        unseen.append(f"{path} wants another key (HTTP {status}): set CSA2_API_KEY to the admin key")
    elif status != HTTPStatus.OK:
        unseen.append(f"{path} answers with HTTP {status}")
    else:
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            unseen.append(f"{path} does not answer with a JSON object ({error})")
    return None


def _calibration(calibration: str | None, model: str | None, unseen: list[str]) -> str | None:
    if calibration is None:
        return None
    if model is None or not Path(model).is_dir() or not Path(calibration).is_dir():
        unseen.append("whether the calibration fits the model: both are folders on the machine of the server; look there")
        return None
    return calibration_fault(Path(calibration), Path(model))
