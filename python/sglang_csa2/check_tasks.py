"""`csa2 check --tasks`: tasks with known answers, put to one engine after the other.

The pages of the text are sealed before the question comes: of a compressed cache the text is asked for first, and the
question with the text again, which then is found in the cache. That is how kvpress compresses, and how documents are served.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csa2.check.errors import CheckError, EngineError
from csa2.check.formats import parse_formats, with_variant
from csa2.check.prompts import STEP_TOKENS, Protocol
from csa2.check.results import byte_fractions
from csa2.check.tasks.outcome import FULL, Answer, TaskRecord, answered, start_record, write_json
from csa2.check.tasks.sample import Sample
from csa2.check.tasks.suite import TaskPlan, make_samples, parse_tasks
from csa2.options import PAGE_SIZE
from sglang_csa2 import check_inputs, check_measure
from sglang_csa2.check_engine import Engine
from sglang_csa2.check_inputs import ModelFacts

if TYPE_CHECKING:
    from sglang_csa2.check_measure import EngineSettings, Tick


@dataclass(frozen=True)
class Question:
    """A sample as the model reads it."""

    sample: Sample
    context: int
    tokens: tuple[int, ...]
    text_tokens: int
    """Of the text, in whole pages; what follows is the end of the text, the question and the beginning of the answer."""


@dataclass(frozen=True)
class TaskInputs:
    """All that a check by tasks works on."""

    plan: TaskPlan
    formats: tuple[str, ...]
    questions: tuple[Question, ...]
    facts: ModelFacts

    @property
    def sizes(self) -> Protocol:
        """Sizes of an engine: its longest request takes a step more than the longest prompt with its answer."""
        longest = -(-max(self.plan.contexts) // STEP_TOKENS) * STEP_TOKENS
        return Protocol(longest, STEP_TOKENS, 0, self.plan.seed)


def check_folder(kvpress: Path | None) -> None:
    """Raises CheckError: results could not be written into this folder."""
    if kvpress is not None:
        # A name inside it stands for the folder itself, which need not be there.
        check_inputs.check_target("--kvpress", (kvpress / "results") if kvpress.is_dir() else kvpress)


def prepare(arguments: argparse.Namespace) -> TaskInputs:
    """Everything that can be refused before an engine starts.

    Raises:
        Csa2Error: names what is wrong.
    """
    contexts = parse_contexts(arguments.context)
    plan = TaskPlan(parse_tasks(arguments.tasks), contexts, arguments.samples, arguments.seed)
    plan.validate()
    formats = with_variant(parse_formats(arguments.formats), arguments.variant)
    tokenizer = check_inputs.load_tokenizer(arguments.model)
    facts = check_inputs.read_model(arguments.model, arguments.dtype, arguments.variant)
    if max(contexts) > facts.window_tokens:
        raise CheckError(f"--context {max(contexts)} is beyond the {facts.window_tokens} tokens that the model takes")

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return found

    questions = []
    for context in contexts:
        for sample in make_samples(plan, context, lambda text: len(ids(text))):
            tokens = ids(sample.prompt)
            shared = len(_common_prefix(ids(sample.context), tokens))
            questions.append(Question(sample, context, tuple(tokens), shared // PAGE_SIZE * PAGE_SIZE))
    return TaskInputs(plan, formats, tuple(questions), facts)


def run(inputs: TaskInputs, arguments: argparse.Namespace, settings: "EngineSettings") -> TaskRecord:
    """Ask the uncompressed cache, then every format; what is known so far is written after each.

    Raises:
        EngineError: an engine ended, refused, or did not cache what it should.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    record = start_record(inputs.plan, str(arguments.model), arguments.dtype)
    names = (FULL, *inputs.formats)
    with tqdm(total=len(names) * len(inputs.questions), unit="answer", file=sys.stderr) as bar:
        for name in names:
            bar.set_description(name)
            engine_name = check_measure.FULL if name == FULL else name
            options = check_measure.engine_arguments(engine_name, arguments.model, inputs.facts, inputs.sizes, settings)
            record.engines[name] = options
            answers, fractions = ask(name, options, inputs.questions, bar.update)
            record.add(name, answers, fractions)
            write_json(record, arguments.json)
    return record


def ask(
    name: str, options: dict[str, Any], questions: tuple[Question, ...], tick: "Tick"
) -> tuple[list[Answer], dict[int, float]]:
    """Answers to all questions from one engine, and bytes of the pages over bf16, by context."""
    answers = []
    stats: dict[int, list[dict[str, object]]] = {}
    with Engine(name, options) as engine:
        for question in questions:
            engine.flush()
            cached = 0 if name == FULL else question.text_tokens
            if cached:
                engine.generate(question.tokens[:cached])
            said, found = engine.answer(question.tokens, question.sample.new_tokens)
            if found != cached:
                raise EngineError(
                    f"the engine for {name} found {found} tokens of a text in its cache instead of {cached}, so this would "
                    f"not measure what it says. Report it with `csa2 info`"
                )
            answers.append(answered(question.sample, question.context, said))
            if name != FULL:
                stats.setdefault(question.context, []).append(engine.stats())
            tick()
    contexts = dict.fromkeys(question.context for question in questions)
    fractions = {each: byte_fractions(name.partition(" (")[0], stats[each])[1] if stats else 1.0 for each in contexts}
    return answers, fractions


def report(record: TaskRecord, kvpress: Path | None) -> str:
    """The tables, and where kvpress's folders lie."""
    from csa2.check.tasks.kvpress import export
    from csa2.check.tasks.table import render_tables

    text = render_tables(record)
    if kvpress is None:
        return text
    return "\n".join([text, "", *(f"wrote {path}" for path in export(record, kvpress))])


def parse_contexts(text: str) -> tuple[int, ...]:
    """Numbers of tokens from a comma-separated list, each once.

    Raises:
        CheckError: one of them is no number.
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise CheckError(
            f"--context {text!r} is no number of tokens: give one, or with --tasks several, as 1024,2048"
        ) from None


def _common_prefix(first: list[int], second: list[int]) -> list[int]:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return first[:same]
