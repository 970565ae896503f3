"""`csa2 doctor`: arguments in, report out."""

import argparse
from typing import Any

import msgspec

from csa2.doctor import cache_rules, load_rules, setup_rules
from csa2.doctor.collect import observe
from csa2.doctor.divergence import describe, divergence_finding, find_divergence
from csa2.doctor.finding import Finding
from csa2.doctor.prompt_file import as_units, read_prompts
from csa2.doctor.readings import Case
from csa2.errors import OptionError
from csa2.units import format_bytes, parse_bytes

RULES = (*setup_rules.RULES, *cache_rules.RULES, *load_rules.RULES)
MAX_SECONDS = 3600.0


def find(case: Case) -> list[Finding]:
    """All findings of a case, in the order of the rules."""
    return [finding for rule in RULES if (finding := rule(case)) is not None]


def answer(arguments: argparse.Namespace) -> tuple[str, int]:
    """The report as text or JSON, and the exit code: 0 without findings, 1 with some.

    Raises:
        Csa2Error: nothing could be looked at.
    """
    if not 0 <= arguments.seconds <= MAX_SECONDS:
        raise OptionError(f"--seconds {arguments.seconds:g} is out of range: give 0 to {MAX_SECONDS:g}")
    if arguments.flags:
        return _before_a_start(arguments)
    if arguments.memory is not None:
        raise OptionError("--memory belongs to flags that are looked at: give them after `--`, or leave --memory out")
    # First, so that a wrong file fails before the server is watched.
    prompts = read_prompts(arguments.prompts) if arguments.prompts else None
    seen = observe(arguments.url, arguments.seconds)
    findings = find(seen.case)
    facts = _facts(seen.case)
    if prompts is not None:
        units = as_units(prompts, arguments.model or seen.model)
        divergence = find_divergence(units)
        finding = divergence_finding(divergence, seen.case.page_size)
        # It names the cause of low hits, so it comes first.
        findings = findings if finding is None else [finding, *findings]
        facts.append(describe(divergence))
        if units.reason:
            seen.unseen.append(f"tokens of the prompts; characters are compared: {units.reason}")
    if arguments.json:
        heads = {"url": arguments.url, "seconds": seen.case.seconds}
        return _as_json(heads, facts, findings, seen.unseen), 1 if findings else 0
    head = f"Looked at {arguments.url} for {seen.case.seconds:g} s:"
    return _as_text(head, facts, findings, seen.unseen), 1 if findings else 0


def _before_a_start(arguments: argparse.Namespace) -> tuple[str, int]:
    """Report about flags alone."""
    # Here, because it needs torch, which takes seconds.
    from csa2.doctor.before_start import look

    if arguments.prompts is not None:
        raise OptionError("--prompts belongs to a server that runs: leave it out, or the flags after `--`")
    memory = None if arguments.memory is None else parse_bytes(arguments.memory, "--memory")
    facts, findings, unseen = look(arguments.flags, memory)
    code = 1 if findings else 0
    if arguments.json:
        return _as_json({"flags": list(arguments.flags)}, facts, findings, unseen), code
    return _as_text("Looked at the flags; nothing was started:", facts, findings, unseen), code


def _facts(case: Case) -> list[str]:
    """What was looked at, in numbers."""
    stats = case.stats
    facts = [
        f"{format_bytes(stats['used_bytes'])} of {format_bytes(stats['arena_bytes'])} in use, "
        f"{stats['compression_ratio']:.2f} times smaller than bf16, target ratio {stats['target_ratio']:g}",
        f"{stats['prefix_hit_tokens_total']} of {stats['prompt_tokens_total']} prompt tokens were found in the cache, "
        f"{stats['evicted_tokens_total']} tokens were evicted",
    ]
    if case.loads:
        last = case.loads[-1]
        busy_s = sum(pace.busy_s for pace in case.paces)
        pace = f", {sum(pace.tokens for pace in case.paces) / busy_s:.1f} tokens/s while busy" if busy_s else ""
        facts.append(f"{last.running} requests run, {last.waiting} wait{pace}")
    if (first := case.mean("time_to_first_token_seconds")) is not None:
        facts.append(f"first token after {first.value:.2f} s (mean of {first.count} requests)")
    return facts


def _as_text(head: str, facts: list[str], findings: list[Finding], unseen: list[str]) -> str:
    lines = [head, *(f"  {fact}" for fact in facts)]
    if unseen:
        lines += ["Could not look at:", *(f"  {reason}" for reason in unseen)]
    lines.append("")
    if not findings:
        lines.append("Nothing stands out.")
    lines += [finding.as_text(number) for number, finding in enumerate(findings, 1)]
    return "\n".join(lines)


def _as_json(heads: dict[str, Any], facts: list[str], findings: list[Finding], unseen: list[str]) -> str:
    record: dict[str, Any] = {
        **heads,
        "facts": facts,
        "findings": [finding.as_record() for finding in findings],
        "not_seen": unseen,
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
