"""Tasks of the check: what is asked, how it is scored, tables and kvpress's layout."""

import csv
import json
import random
import re

import pytest
import yaml

from csa2.check.errors import CheckError
from csa2.check.tasks import words
from csa2.check.tasks.kvpress import export
from csa2.check.tasks.outcome import FULL, answered, start_record, write_json
from csa2.check.tasks.sample import answer_score, longest
from csa2.check.tasks.suite import GROUPS, TASKS, TaskPlan, make_samples, parse_tasks
from csa2.check.tasks.table import render_tables


def count(text):
    """A tokenizer of words, numbers and marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


PLAN = TaskPlan(tuple(TASKS), (400, 900), samples=3, seed=5)


def test_no_word_means_two_things():
    lists = (words.ADJECTIVES, words.ANIMALS, words.THINGS, words.TRADES, words.PLACES)
    every = [word for each in lists for word in each]
    assert len(every) == len(set(every))


def test_samples_fill_the_context_and_repeat_with_the_seed():
    samples = make_samples(PLAN, 400, count)
    assert [sample.task for sample in samples] == [task for task in TASKS for _ in range(3)]
    for sample in samples:
        # A sentence of a chronicle has 10 to 16 words.
        assert 400 - 18 <= count(sample.prompt) + sample.new_tokens <= 400
    assert make_samples(PLAN, 400, count) == samples
    assert len({sample.context for sample in samples}) == len(samples)
    other = TaskPlan(PLAN.tasks, PLAN.contexts, PLAN.samples, seed=6)
    assert make_samples(other, 400, count)[0] != samples[0]


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_in_the_text_and_nowhere_else(task):
    sample = TASKS[task](random.Random(3), 30)
    assert answer_score(sample.context, sample.answers) == 1
    assert len(set(sample.answers)) == len(sample.answers)
    asked = sample.question + sample.answer_prefix
    assert answer_score(asked, sample.answers) == 0


def test_variables_are_traced_from_one_to_the_next():
    sample = TASKS["variables"](random.Random(1), 20)
    text = sample.context.partition("Here is another text.")[2]
    links = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
    assert tuple(name for name, _ in links) == sample.answers
    assert [source for _, source in links[1:]] == list(sample.answers[:-1])
    assert links[0][1] in sample.question


def test_common_words_are_the_most_common():
    sample = TASKS["common-words"](random.Random(2), 200)
    entries = sample.context.partition("\n\n")[2].split()
    often = sorted(set(entries), key=lambda word: -entries.count(word))[: len(sample.answers)]
    assert set(often) == set(sample.answers)
    assert entries.count(often[-1]) > 5 * max(entries.count(word) for word in set(entries) - set(often))


def test_score_is_the_share_of_the_wanted_strings():
    assert answer_score("It is 12345, and ABC.", ("12345", "abc", "67")) == pytest.approx(2 / 3)


def test_a_text_that_does_not_fit():
    with pytest.raises(CheckError, match=r"--context 60 is too short for the task 'variables', which takes \d+"):
        longest(lambda filler: TASKS["variables"](random.Random(0), filler), 60, count)


@pytest.mark.parametrize(
    ("tasks", "said"), [("", "names no task"), ("needles", "'needles' is unknown: choose from needle, multi-key")]
)
def test_unknown_tasks(tasks, said):
    with pytest.raises(CheckError, match=said):
        parse_tasks(tasks)


def test_groups_stand_for_their_tasks():
    assert parse_tasks("needle, multi-needle,needle") == ("needle", *GROUPS["multi-needle"])
    assert parse_tasks("all") == tuple(TASKS)


@pytest.mark.parametrize(("change", "said"), [({"contexts": (64,)}, "--context 64 leaves"), ({"samples": 0}, "--samples 0")])
def test_unusable_plans(change, said):
    with pytest.raises(CheckError, match=said):
        TaskPlan(**{"tasks": ("needle",), "contexts": (512,), **change}).validate()


@pytest.fixture
def record():
    plan = TaskPlan(("needle", "multi-value"), (400,), samples=2)
    record = start_record(plan, "models/demo", "auto")
    samples = make_samples(plan, 400, count)
    right = [answered(sample, 400, ", ".join(sample.answers)) for sample in samples]
    # One needle is not found, and of one list of four the first value only.
    worse = [answered(samples[0], 400, "nothing"), right[1], answered(samples[2], 400, samples[2].answers[0]), right[3]]
    record.add(FULL, right, {400: 1.0})
    record.add("fp4", worse, {400: 0.3})
    return record


def test_rows(record):
    needle, values = record.rows_of("fp4", 400)
    assert (needle.score_pct, needle.full_score_pct, needle.change_pct) == (50, 100, -50)
    assert needle.change_se_pct == pytest.approx(50)
    assert values.score_pct == pytest.approx(62.5)
    assert values.same_answer_pct == 50


def test_table(record):
    lines = render_tables(record).splitlines()
    assert lines[0] == "400 tokens"
    assert lines[1].split() == ["format", "in", "all", "needle", "multi-value", "mean", "change", "same"]
    assert lines[2].split() == ["full", "1.000", "100.0", "100.0", "100.0"]
    # Four samples that change by 100, 0, 75 and 0.
    assert lines[3].split() == ["fp4", "0.300", "50.0", "62.5", "56.2", "-43.8", "+-", "25.8", "50"]


def test_json(record, tmp_path):
    write_json(record, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["plan"]["tasks"] == ["needle", "multi-value"]
    assert [row["format"] for row in written["results"]] == ["full", "full", "fp4", "fp4"]
    assert written["answers"]["fp4"][0]["said"] == "nothing"


def test_layout_of_kvpress(record, tmp_path):
    full, packed = export(record, tmp_path / "results")
    assert full.name == "csa2_tasks__400__demo__no_press__0.00"
    assert packed.name == "csa2_tasks__400__demo__fp4__0.70"
    assert json.loads((packed / "metrics.json").read_text()) == {
        "needle": {"string_match": 50.0},
        "multi-value": {"string_match": 62.5},
    }
    config = yaml.safe_load((packed / "config.yaml").read_text())
    assert (config["press_name"], config["compression_ratio"], config["model"]) == ("fp4", 0.7, "demo")
    with (packed / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["predicted_answer"] == "nothing"
    assert rows[0]["answer"].startswith("['")
    # Like kvpress, nothing that is there is overwritten.
    again = export(record, tmp_path / "results")
    assert [path.relative_to(full.parent).as_posix() for path in again] == [f"{full.name}/1", f"{packed.name}/1"]
