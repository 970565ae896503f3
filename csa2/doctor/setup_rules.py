"""Findings about how the server was started: implementation and calibration."""

from csa2.doctor.cache_rules import REDUCED
from csa2.doctor.finding import Finding
from csa2.doctor.readings import Case


def reference_code(case: Case) -> Finding | None:
    """Attention is computed by the torch reference."""
    if case.options["impl"] != "reference":
        return None
    asked = case.arguments.get("csa2_impl") == "reference"
    separated = case.options["rope"] == "separated"
    if separated:
        fix = ("--csa2-rope rotated, which compiled code reads",)
    elif asked:
        fix = ("start it without --csa2-impl reference",)
    else:
        fix = ("install a C++ compiler (on Debian and Ubuntu: g++) and start the server again",)
    return Finding(
        name="reference-implementation",
        title="No compiled code: attention is computed by the torch reference",
        seen=f"impl reference ({str(case.options['impl_detail']).splitlines()[0]})",
        why="it is there to be checked against, and several times slower",
        fix=(*fix, "csa2 info shows which instruction sets this machine has"),
        anchor="no-compiled-code",
    )


def calibration_of_another_model(case: Case) -> Finding | None:
    """The calibration does not belong to the model that is served."""
    if case.calibration_fault is None:
        return None
    return Finding(
        name="mismatched-calibration",
        title="The calibration does not fit the model",
        seen=f"--csa2-calibration {case.options['calibration']}: {case.calibration_fault}",
        why="channels and heads that matter in another model get the bytes, and those of this one lose them",
        fix=(
            "csa2 calibrate --model DIR --text FILE... --out NEW, then --csa2-calibration NEW",
            "or leave --csa2-calibration out",
        ),
        anchor="calibration-that-does-not-fit",
    )


def not_calibrated(case: Case) -> Finding | None:
    """Formats with fewer channels are in use, and nobody said which channels matter."""
    pages = sum(count for name, count in case.stats["pages"].items() if name.startswith(REDUCED))
    if case.options["calibration"] is not None or not pages:
        return None
    return Finding(
        name="no-calibration",
        title="Pages smaller than 4 bits are in use without a calibration",
        seen=f"{pages} of {sum(case.stats['pages'].values())} pages, target ratio {case.stats['target_ratio']:g}",
        why="the slowest rotary pairs are kept and every head gets the same bytes, which loses several times more",
        fix=(
            "csa2 calibrate --model DIR --text FILE... --out NEW, then --csa2-calibration NEW",
            "csa2 check --model DIR --text FILE...: what each format costs",
        ),
        anchor="calibration-that-does-not-fit",
    )


RULES = (reference_code, calibration_of_another_model, not_calibrated)
