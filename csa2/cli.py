"""The `csa2` command: `csa2 demo-model`, `info`, `plan`, `top`, `doctor`, `calibrate`, and what other packages add.

A command that needs more than this package is an entry point of the group `csa2.commands`: a function that takes the
subparsers, adds its own and sets `run` on it, a function from the parsed arguments to the exit code.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from csa2 import __version__
from csa2.errors import Csa2Error

COMMANDS = "csa2.commands"
"""Entry point group of further commands."""

# What a subcommand needs is imported when it runs: `csa2 --help` must not wait for torch.


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the command line.

    Returns:
        0, or 1 with one line on the error stream; `csa2 check` and `csa2 doctor` say more by their
        codes. Bad usage exits with 2, through argparse.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except Csa2Error as error:
        print(f"csa2 {arguments.command} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"csa2 {arguments.command} was interrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="csa2", description="Tools of sglang-csa2, the compressed cache for SGLang.")
    parser.add_argument("--version", action="version", version=f"sglang-csa2 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo-model",
        help="fetch the small demo model once and print its folder",
        description="Fetch a small chat model, convert it, and print its folder as the last line. Later calls only "
        "print the folder.",
    )
    demo.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder that holds the model (default: $CSA2_CACHE_DIR, $XDG_CACHE_HOME/sglang-csa2 or ~/.cache/sglang-csa2)",
    )

    demo.set_defaults(run=lambda arguments: _demo_model(arguments.cache_dir))

    info = commands.add_parser(
        "info",
        help="print versions, machine and options, for bug reports",
        description="Print versions, machine and options. With --url also what a running server reports.",
    )
    info.add_argument(
        "--url",
        nargs="?",
        const="http://127.0.0.1:30000",
        metavar="URL",
        help="also ask the server at URL (default: %(const)s), started with --kv-compress csa2",
    )
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    info.set_defaults(run=lambda arguments: _info(arguments.url, arguments.json))

    _add_plan(commands)
    _add_top(commands)
    _add_doctor(commands)

    calibrate = commands.add_parser(
        "calibrate",
        help="find out which key channels, heads and tokens of a model matter most",
        description="Run a model over text and write a calibration folder for --csa2-calibration. An interrupted run goes "
        "on where it was.",
    )
    calibrate.add_argument("--model", required=True, metavar="DIR", help="folder of the model")
    calibrate.add_argument("--text", required=True, nargs="+", metavar="FILE", help="text like what will be served")
    calibrate.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    calibrate.add_argument("--samples", type=int, default=256, help="pieces of text to read (default: %(default)s)")
    calibrate.add_argument("--sample-tokens", type=int, default=512, help="tokens of a piece (default: %(default)s)")
    calibrate.add_argument(
        "--budget-samples", type=int, default=16, help="long pieces, for the budgets of heads (default: %(default)s)"
    )
    calibrate.add_argument("--budget-tokens", type=int, default=3584, help="tokens of a long piece (default: %(default)s)")
    calibrate.add_argument(
        "--scorer",
        default="none",
        choices=("none", "ridge", "mlp", "best"),
        help="score of tokens when merging: without training, corrected by a regression or by a small network, or whichever "
        "of these has the smallest error on text held out (default: %(default)s)",
    )
    calibrate.add_argument("--scorer-samples", type=int, default=60, help="pieces, for the scorer (default: %(default)s)")
    calibrate.add_argument("--scorer-tokens", type=int, default=2560, help="tokens of such a piece (default: %(default)s)")
    calibrate.add_argument("--seed", type=int, default=0, help="which pieces (default: %(default)s)")
    calibrate.set_defaults(run=_calibrate)
    _add_commands(commands)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="tell what of a model and its cache fits into a memory, by format",
        description="Print what a token takes, what is left for the cache, how many tokens and requests fit in each format, "
        "and flags for a server. Exits with 1 when what is asked for does not fit.",
    )
    plan.add_argument("--model", required=True, type=Path, metavar="DIR_OR_FILE", help="folder of the model, or config.json")
    plan.add_argument("--memory", required=True, metavar="SIZE", help="memory of one device, for example 24GiB")
    plan.add_argument("--context", required=True, type=int, metavar="TOKENS", help="tokens of a request, answer included")
    plan.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests at once (default: %(default)s)")
    plan.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism (default: %(default)s)")
    plan.add_argument("--weights-bytes", metavar="SIZE", help="weights (default: the files of the folder, or an estimate)")
    plan.add_argument("--reserve", metavar="SIZE", help="left for activations and runtime (default: an estimate)")
    plan.add_argument("--json", action="store_true", help="print JSON instead of text")
    plan.set_defaults(run=_plan)


def _add_top(commands: Any) -> None:
    top = commands.add_parser(
        "top",
        help="watch the cache of a running server in the terminal",
        description="Show what the cache of a running server holds, again and again, until Ctrl-C. Where the output is no "
        "terminal, readings follow each other.",
    )
    top.add_argument(
        "--url",
        default="http://127.0.0.1:30000",
        help="server started with --kv-compress csa2 (default: %(default)s); its keys are taken from CSA2_API_KEY and "
        "CSA2_ADMIN_API_KEY",
    )
    top.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between readings (default: %(default)s)"
    )
    top.add_argument("--once", action="store_true", help="print one reading and end")
    top.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> int:
    from csa2.top.command import run

    return run(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from csa2.plan.command import answer

    text, code = answer(arguments)
    print(text)
    return code


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look at a running server, or at the flags of one, and name likely causes of what is wrong",
        description="Read a server some seconds apart and print what is likely to cost memory, speed or quality, why, and "
        "what to do. With flags after `--` look at these, at the model and at the machine instead, and start nothing. Exits "
        "with 0 when nothing stands out, 1 with findings, 2 when it cannot look.",
    )
    doctor.add_argument(
        "--url",
        default="http://127.0.0.1:30000",
        metavar="URL",
        help="server, started with --kv-compress csa2; its key in CSA2_API_KEY (default: %(default)s)",
    )
    doctor.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="some prompts that were sent, one a line, as text or JSON: shows where they first differ",
    )
    doctor.add_argument("--model", metavar="DIR", help="tokenizer for --prompts (default: the model of the server)")
    doctor.add_argument("--seconds", type=float, default=5.0, help="how long to look (default: %(default)s)")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument("--memory", metavar="SIZE", help="of one device, for flags (default: that of this machine)")
    doctor.add_argument("flags", nargs="*", metavar="FLAG", help="after `--`: flags of a server that is not started yet")
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from csa2.doctor.command import answer

    try:
        text, code = answer(arguments)
    except Csa2Error as error:
        print(f"csa2 doctor failed: {error}", file=sys.stderr)
        return 2
    print(text)
    return code


def _add_commands(commands: Any) -> None:
    """Add the commands of the entry points. One that cannot be loaded is named and left out: the others must still work."""
    for entry in sorted(importlib.metadata.entry_points(group=COMMANDS), key=lambda entry: entry.name):
        try:
            entry.load()(commands)
        except (ImportError, AttributeError) as error:
            print(f"csa2 {entry.name} is not available ({error}): install sglang-csa2 again", file=sys.stderr)


def _demo_model(cache_dir: str | None) -> int:
    from csa2.demo_model import ensure_demo_model

    folder = ensure_demo_model(cache_dir, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(folder)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from csa2.calibrate.run import ADVISED_SAMPLES, CalibrateOptions, calibrate

    options = CalibrateOptions(
        model=Path(arguments.model),
        texts=tuple(Path(path) for path in arguments.text),
        out=Path(arguments.out),
        samples=arguments.samples,
        sample_tokens=arguments.sample_tokens,
        budget_samples=arguments.budget_samples,
        budget_tokens=arguments.budget_tokens,
        scorer=arguments.scorer,
        scorer_samples=arguments.scorer_samples,
        scorer_tokens=arguments.scorer_tokens,
        seed=arguments.seed,
    )
    samples = calibrate(options).config.samples
    if samples < ADVISED_SAMPLES:
        print(f"csa2 calibrate: only {samples} samples, give text for {ADVISED_SAMPLES} or more", file=sys.stderr)
    print(options.out)
    return 0


def _info(url: str | None, as_json: bool) -> int:
    from csa2.info import collect, render

    report = collect(url)
    print(json.dumps(report, indent=2) if as_json else render(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
