"""`csa2 check`: what a compressed format costs in quality, measured through the real serving path.

Also runs as `python -m sglang_csa2.check`.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csa2.errors import Csa2Error
from sglang_csa2 import check_options

if TYPE_CHECKING:
    from csa2.check.record import Record
    from csa2.check.results import Measured
    from sglang_csa2.check_inputs import Inputs
    from sglang_csa2.check_measure import EngineSettings, Tick

# What it takes is imported when it runs: the `csa2` command loads this file for its parser.

AGREES, DISAGREES, NOT_MEASURED = 0, 1, 2
"""Exit codes."""


def add_parser(commands: Any) -> None:
    """Add `check` to the subparsers of the `csa2` command."""
    parser = commands.add_parser(
        "check",
        help="measure what compressed formats cost in quality",
        description="Score texts with the uncompressed cache and with each format, through real engines, one after the "
        "other. Or, with --tasks, put questions with known answers to them. Exit code 0: measured; 1: a format agrees less "
        "than --min-agreement; 2: not measured.",
    )
    check_options.add_options(parser)
    check_options.add_task_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; the exit code."""
    try:
        return _run(arguments)
    except Csa2Error as error:
        print(f"csa2 check failed: {error}", file=sys.stderr)
        return NOT_MEASURED


def _run(arguments: argparse.Namespace) -> int:
    check_options.check_kind(arguments)
    return _run_texts(arguments) if arguments.tasks is None else _run_tasks(arguments)


def _run_tasks(arguments: argparse.Namespace) -> int:
    from sglang_csa2 import check_tasks

    arguments.context = arguments.context or check_options.TASK_CONTEXT
    _check_places(arguments)
    check_tasks.check_folder(arguments.kvpress)
    inputs = check_tasks.prepare(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = check_tasks.run(inputs, arguments, _settings(arguments))
    print(check_tasks.report(record, arguments.kvpress))
    return AGREES


def _run_texts(arguments: argparse.Namespace) -> int:
    from csa2.check.plot import draw
    from csa2.check.record import write_json
    from csa2.check.report import render_advice, render_disagreements, render_table

    inputs = _prepare(arguments)
    # A terminated check must not leave an engine behind: let it unwind like an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = _measure(inputs, arguments)
    rows = record.results
    if arguments.layers:
        _add_layers(record, inputs, arguments)
    write_json(record, arguments.json)
    if arguments.plot is not None:
        draw(arguments.plot, rows, record.loss_by_layer, inputs.protocol.context)
    print(render_table(rows))
    print(render_disagreements(record.disagreements))
    failed = [row for row in rows if row.top1_agreement_pct < arguments.min_agreement]
    for row in failed:
        print(render_advice(rows, row, arguments.min_agreement))
    return DISAGREES if failed else AGREES


def _prepare(arguments: argparse.Namespace) -> "Inputs":
    """Everything that can be refused before an engine starts."""
    from csa2.check.errors import CheckError
    from csa2.check.formats import parse_formats, with_variant
    from csa2.check.prompts import Protocol
    from sglang_csa2 import check_inputs
    from sglang_csa2.check_tasks import parse_contexts

    contexts = parse_contexts(arguments.context or str(Protocol().context))
    if len(contexts) > 1:
        raise CheckError(f"--context {arguments.context}: give one number of tokens, several go with --tasks")
    protocol = Protocol(contexts[0], arguments.score_tokens, arguments.copies, arguments.seed)
    protocol.validate()
    formats = with_variant(parse_formats(arguments.formats), arguments.variant)
    check_inputs.check_agreement(arguments.min_agreement)
    check_inputs.check_target("--plot", arguments.plot)
    check_inputs.check_target("--full", arguments.full)
    _check_places(arguments)
    tokenizer = check_inputs.load_tokenizer(arguments.model)
    documents = check_inputs.read_documents(arguments.text, tokenizer, protocol)
    facts = check_inputs.read_model(arguments.model, arguments.dtype, arguments.variant)
    check_inputs.check_window(facts, protocol)
    return check_inputs.Inputs(protocol, formats, tokenizer, documents, facts)


def _check_places(arguments: argparse.Namespace) -> None:
    """Check what both kinds of check share, and keep Hugging Face libraries from asking the network."""
    from csa2.options import CacheOptions
    from sglang_csa2 import check_inputs

    if arguments.csa2_warm_tokens is not None:
        CacheOptions(warm_tokens=arguments.csa2_warm_tokens).validate()
    check_inputs.check_impl(arguments.variant, arguments.csa2_impl)
    check_inputs.check_target("--json", arguments.json)
    check_inputs.check_folder(arguments.model)
    check_inputs.check_calibration(arguments.csa2_calibration, arguments.model)
    check_inputs.stay_offline()


def _settings(arguments: argparse.Namespace) -> "EngineSettings":
    from csa2.check.formats import DEFAULT_VARIANT
    from sglang_csa2.check_measure import EngineSettings

    # Variants are compared by the implementation that serves both.
    impl = arguments.csa2_impl if arguments.variant == DEFAULT_VARIANT else "reference"
    return EngineSettings(arguments.dtype, impl, arguments.device, arguments.csa2_calibration, arguments.csa2_warm_tokens)


def _measure(inputs: "Inputs", arguments: argparse.Namespace) -> "Record":
    """Measure every format against the full cache; what is known so far is written after each."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from csa2.check.record import start_record, write_json
    from sglang_csa2 import check_measure
    from sglang_csa2.check_measure import FULL

    names = (FULL, *inputs.formats)
    record = start_record(inputs.protocol, str(arguments.model), arguments.dtype, inputs.entries)
    tokens = [document.tokens for document in inputs.documents]
    settings = _settings(arguments)
    full = None
    total = len(names) * check_measure.units(inputs.documents, inputs.protocol)
    with tqdm(total=total, unit="step", file=sys.stderr) as bar:
        for name in names:
            bar.set_description(name)
            options = check_measure.engine_arguments(name, arguments.model, inputs.facts, inputs.protocol, settings)
            record.engines[name] = options
            if full is None:
                full = _full_scores(options, inputs, arguments, bar.update)
                bar.update(check_measure.units(inputs.documents, inputs.protocol) - bar.n)
                continue
            measured = check_measure.measure(name, options, inputs.documents, inputs.protocol, bar.update)
            record.add(name, full, measured, tokens, inputs.tokenizer.decode)
            write_json(record, arguments.json)
    return record


def _full_scores(options: dict[str, Any], inputs: "Inputs", arguments: argparse.Namespace, tick: "Tick") -> "Measured":
    """Scores of the full cache: kept ones if there are, measured ones otherwise."""
    from csa2.check.kept import keep, recall
    from sglang_csa2.check_inputs import conditions
    from sglang_csa2.check_measure import FULL, measure

    path: Path | None = arguments.full
    holds = conditions(options, inputs.documents, inputs.protocol)
    if path is not None and path.exists():
        return recall(path, holds)
    measured = measure(FULL, options, inputs.documents, inputs.protocol, tick)
    if path is not None:
        keep(path, measured, holds)
    return measured


def _add_layers(record: "Record", inputs: "Inputs", arguments: argparse.Namespace) -> None:
    """Where in the model the formats cost most; after the engines, which hold the memory until then."""
    from csa2.check.layers import layer_errors

    print("looking at the layers one by one", file=sys.stderr)
    record.loss_by_layer = layer_errors(
        arguments.model,
        inputs.documents[0].tokens,
        inputs.protocol.context,
        [row.name for row in record.results],
        record.identity_layers,
        arguments.csa2_calibration,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command alone: what `python -m sglang_csa2.check` runs."""
    parser = argparse.ArgumentParser(prog="csa2")
    add_parser(parser.add_subparsers(dest="command", required=True))
    arguments = parser.parse_args(["check", *(sys.argv[1:] if argv is None else argv)])
    return run(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
