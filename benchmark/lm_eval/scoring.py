"""Called by lm-eval, which has no csa2: the score of `csa2 check --tasks`, once more."""

from typing import Any


def string_match(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Share of the wanted strings that the answer contains, upper and lower case alike."""
    said = results[0].lower()
    return {"string_match": sum(each.lower() in said for each in doc["answers"]) / len(doc["answers"])}
