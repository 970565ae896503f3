"""What the doctor says about flags of a server that is not started."""

from collections.abc import Sequence

from csa2.doctor.finding import Finding
from csa2.doctor.flag_rules import RULES
from csa2.doctor.flags import FlagCase, gather
from csa2.errors import OptionError
from csa2.units import format_bytes


def look(words: Sequence[str], memory_bytes: int | None) -> tuple[list[str], list[Finding], list[str]]:
    """Facts, findings, and what could not be looked at.

    Args:
        words: flags, after a command or without.
        memory_bytes: of one device; None: this machine's.

    Raises:
        OptionError: there are no flags.
    """
    case = gather(words, memory_bytes)
    findings = [finding for rule in RULES if (finding := rule(case)) is not None]
    return facts_of(case), findings, case.unseen


def facts_of(case: FlagCase) -> list[str]:
    """What the flags come to, in numbers."""
    facts = []
    if case.model is not None:
        facts.append(f"a token takes {case.model.token_bytes} bytes uncompressed: {case.model.formula}")
    if case.arena_bytes is not None and case.arena_bytes > 0:
        source = "--csa2-arena-size" if case.options and case.options.arena_bytes else "memory, less weights: an estimate"
        facts.append(f"the arena has {format_bytes(case.arena_bytes)} ({source})")
    if case.context is not None:
        facts.append(f"requests have up to {case.context} tokens{_fitting(case, case.context)}")
    return facts


def _fitting(case: FlagCase, context: int) -> str:
    try:
        fit = case.requests(context)
    except OptionError:
        fit = 0
    return "" if fit is None else f"; {fit} of that length fit at once when pages are as small as they get"
