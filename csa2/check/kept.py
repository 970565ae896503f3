"""Scores of the full cache in a file, so that the next check of the same texts need not measure them again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csa2.check.errors import CheckError
from csa2.check.metrics import TokenScores
from csa2.check.results import Measured

_PARTS = ("tokens", "logprobs", "top_tokens", "top_logprobs")


def keep(path: Path, measured: Measured, conditions: dict[str, Any]) -> None:
    """Write scores, and the conditions under which they hold, to `path`."""
    arrays = {"conditions": np.array(_text(conditions))}
    for name, scores in (("scores", measured.scores), ("copies", measured.copies)):
        arrays[f"{name}/lengths"] = np.array([each.tokens.size for each in scores], dtype=np.int64)
        for part in _PARTS if scores else ():
            arrays[f"{name}/{part}"] = np.concatenate([getattr(each, part) for each in scores])
    with path.open("wb") as file:
        # An open file, because numpy would add a suffix to a name.
        np.savez_compressed(file, allow_pickle=False, **arrays)


def recall(path: Path, conditions: dict[str, Any]) -> Measured:
    """The scores in `path`.

    Raises:
        CheckError: `path` holds something else, or scores under other conditions; names the first that differs.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        kept = json.loads(str(arrays["conditions"]))
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise CheckError(
            f"--full {path} holds no scores of this command ({error}): delete it or name another file"
        ) from error
    wanted = json.loads(_text(conditions))
    for name in sorted({*kept, *wanted}):
        if kept.get(name) != wanted.get(name):
            raise CheckError(
                f"--full {path} was measured with another {name} ({kept.get(name)} and not {wanted.get(name)}): delete it, "
                f"or name another file"
            )
    return Measured(_scores(arrays, "scores"), _scores(arrays, "copies"))


def _text(conditions: dict[str, Any]) -> str:
    return json.dumps(conditions, sort_keys=True)


def _scores(arrays: dict[str, NDArray[Any]], name: str) -> tuple[TokenScores, ...]:
    ends = np.cumsum(arrays[f"{name}/lengths"])[:-1]
    if not arrays[f"{name}/lengths"].size:
        return ()
    parts: Sequence[list[NDArray[Any]]] = [np.split(arrays[f"{name}/{part}"], ends) for part in _PARTS]
    return tuple(TokenScores(*each) for each in zip(*parts, strict=True))
