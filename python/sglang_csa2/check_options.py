"""Options of `csa2 check`, and which of them belong together."""

import argparse
from pathlib import Path

TASK_CONTEXT = "1024"
"""Tokens of a task unless --context says otherwise."""

# What they take is imported when it runs: the `csa2` command loads this file for its parser.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of scoring texts, most of which tasks have too."""
    from csa2.check.prompts import Protocol
    from csa2.options import ROPE_VARIANTS, CacheOptions

    default = Protocol()
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of the model")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="one document each, UTF-8")
    parser.add_argument("--formats", default="fp4", metavar="A,B", help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--variant",
        choices=ROPE_VARIANTS,
        default=CacheOptions().rope,
        help="'separated': measure every format twice, as pages hold keys by default and with --csa2-rope separated, both "
        "with the torch reference (default: %(default)s)",
    )
    parser.add_argument(
        "--context",
        metavar="N",
        help=f"tokens before those that are scored (default: {default.context}); with --tasks of prompt and answer, several "
        f"as 512,1024 (default: {TASK_CONTEXT})",
    )
    parser.add_argument(
        "--score-tokens", type=int, default=default.score_tokens, metavar="N", help="tokens scored (default: %(default)s)"
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=default.copies,
        metavar="N",
        help="passages repeated per document (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="chooses the passages (default: %(default)s)")
    parser.add_argument(
        "--min-agreement", type=float, default=90.0, metavar="PCT", help="least top-1 agreement (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything to this file")
    parser.add_argument(
        "--full",
        type=Path,
        metavar="FILE",
        help="keep the scores of the full cache in this file, and take them from it if it is there",
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw loss by position and by layer")
    parser.add_argument(
        "--layers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also load the model once more and measure each layer on the first document (default: yes)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        help="as in SGLang (default: %(default)s, since rounding alone changes some of the most likely tokens in bfloat16; "
        "'auto' is what the model serves in)",
    )
    parser.add_argument("--device", help="as in SGLang")
    parser.add_argument("--csa2-calibration", type=Path, metavar="DIR", help="as in SGLang; used by all formats but fp8")
    parser.add_argument("--csa2-impl", default="auto", metavar="IMPL", help="as in SGLang")
    parser.add_argument("--csa2-warm-tokens", type=int, metavar="N", help="as in SGLang")


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of tasks."""
    from csa2.check.tasks.suite import GROUPS, SAMPLES, TASKS

    parser.add_argument(
        "--tasks",
        metavar="A,B",
        help=f"put questions with known answers instead of scoring texts: {', '.join([*TASKS, *GROUPS])}",
    )
    parser.add_argument("--samples", type=int, metavar="N", help=f"of each task and context (default: {SAMPLES})")
    parser.add_argument("--kvpress", type=Path, metavar="DIR", help="also write the answers in kvpress's layout of results")


def check_kind(arguments: argparse.Namespace) -> None:
    """Refuse options of the one kind of check that are given to the other; fill in the defaults of tasks.

    Raises:
        CheckError: names the option.
    """
    from csa2.check.errors import CheckError
    from csa2.check.tasks.suite import SAMPLES

    if arguments.tasks is None:
        if not arguments.text:
            raise CheckError("--text is missing: give files to score, or --tasks for questions with known answers")
        for option in ("samples", "kvpress"):
            if getattr(arguments, option) is not None:
                raise CheckError(f"--{option} does nothing without --tasks: add that option, or leave this one out")
        return
    parser = argparse.ArgumentParser()
    add_options(parser)
    for option in ("text", "score_tokens", "copies", "min_agreement", "full", "plot", "layers"):
        if getattr(arguments, option) != parser.get_default(option):
            flag = "--no-layers" if option == "layers" else "--" + option.replace("_", "-")
            raise CheckError(f"{flag} does nothing with --tasks, which asks questions and scores no texts: leave it out")
    arguments.samples = SAMPLES if arguments.samples is None else arguments.samples
