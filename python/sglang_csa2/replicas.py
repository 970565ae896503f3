"""Replicas of `--dp-size`: their replies to one control message, as one reply.

Each replica is a scheduler with an arena, a radix tree and a book of documents of its own. SGLang sends a control message to
all of them and one request to one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from csa2.stats import CacheStats, combined_stats

Data = dict[str, Any]

DONE_BY = "done_by"
"""Key of a refusal that not all replicas share: those that did what was asked."""


@dataclass(frozen=True)
class Answer:
    """What one replica answers, or all of them together: see `Csa2ControlReqOutput`."""

    ok: bool
    status: int
    data: Data


def combined(op: str, answers: Sequence[Answer]) -> Answer:
    """What `answers`, in the order of the replicas, say together.

    It is refused if one replica refuses, with the highest status; only what documents there are, and which of them are
    removed, is told as long as one replica has them.
    """
    unknown = [not answer.ok and answer.status == HTTPStatus.NOT_FOUND for answer in answers]
    fine = all(answer.ok or missing for answer, missing in zip(answers, unknown, strict=True))
    if not all(answer.ok for answer in answers) and not (op in SOME_MAY_LACK and fine and not all(unknown)):
        return _refusal(answers)
    merge = MERGES.get(op, _side_by_side)
    return Answer(True, int(HTTPStatus.OK), merge([answer.data if answer.ok else None for answer in answers]))


def _refusal(answers: Sequence[Answer]) -> Answer:
    count = len(answers)
    refused = {rank: answer for rank, answer in enumerate(answers) if not answer.ok}
    messages = [answer.data["message"] for answer in refused.values()]
    if len(refused) < count or len(set(messages)) > 1:
        messages = [f"replica {rank} of {count}: {answer.data['message']}" for rank, answer in refused.items()]
    done_by = [rank for rank in range(count) if rank not in refused]
    status = max(answer.status for answer in refused.values())
    return Answer(False, status, {"message": "; ".join(dict.fromkeys(messages)), DONE_BY: done_by})


def _side_by_side(parts: Sequence[Data | None]) -> Data:
    return {"replicas": [{"dp_rank": rank, **part} for rank, part in enumerate(parts) if part is not None]}


def _stats(parts: Sequence[Data | None]) -> Data:
    together: Data = msgspec.to_builtins(combined_stats([msgspec.convert(part, CacheStats) for part in parts]))
    return {**together, **_side_by_side(parts)}


def _ratio(parts: Sequence[Data | None]) -> Data:
    held = [part for part in parts if part is not None]
    together = {"ratio": max(part["ratio"] for part in held), "automatic": all(part["automatic"] for part in held)}
    return {**together, **_side_by_side(parts)}


def _document(views: Sequence[Data | None]) -> Data:
    """One document as its replicas show it; None for one that does not have it."""
    held = [view for view in views if view is not None]
    states = [view["state"] for view in held] + ["failed"] * (len(held) < len(views))
    formats = dict.fromkeys(name for view in held for name in view["formats"])
    return {
        **held[0],
        "state": next((state for state in ("failed", "waiting") if state in states), "resident"),
        "formats": {name: sum(view["formats"].get(name, 0) for view in held) for name in formats},
        **{name: sum(view[name] for view in held) for name in ("pages", "bytes", "hits")},
        "serial": max(view["serial"] for view in held),
        "message": _document_message(views),
        **_side_by_side(views),
    }


def _document_message(views: Sequence[Data | None]) -> str:
    count = len(views)
    told = [(rank, "it is not there" if view is None else view["message"]) for rank, view in enumerate(views)]
    return "; ".join(f"replica {rank} of {count}: {message}" for rank, message in told if message)


def _documents(parts: Sequence[Data | None]) -> Data:
    """Lists of documents, by id."""
    by_id = [{view["id"]: view for view in part["documents"]} for part in parts if part is not None]
    ids = dict.fromkeys(document_id for views in by_id for document_id in views)
    return {"documents": [_document([views.get(document_id) for views in by_id]) for document_id in ids]}


MERGES: dict[str, Callable[[Sequence[Data | None]], Data]] = {
    "stats": _stats,
    "ratio": _ratio,
    "document_add": _document,
    "document": _document,
    "documents": _documents,
    "document_remove": _document,
    "documents_remove": _documents,
}
"""How data of replicas become one, by operation; None stands for a replica that has no such document."""
SOME_MAY_LACK = ("document", "document_remove")
"""Operations of which a replica may know nothing."""


def parts_of(data: Data) -> list[Data]:
    """What each replica said, of a reply that may be that of a single one."""
    return data.get("replicas") or [data]
