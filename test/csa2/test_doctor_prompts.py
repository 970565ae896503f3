"""Where prompts first differ: `csa2 doctor --prompts`."""

import json

import pytest

from csa2.doctor.divergence import describe, divergence_finding, find_divergence
from csa2.doctor.prompt_file import as_units, read_prompts
from csa2.errors import OptionError

RULES = "You are a careful assistant. " + " ".join(f"Rule {n}: be brief about topic {n}." for n in range(80))


def stamped(minute):
    return f"Current time: 2026-03-01 14:{minute:02}. {RULES} Question {minute}?"


def write(path, prompts):
    path.write_text("\n".join(prompts) + "\n")
    return path


@pytest.fixture
def found(tmp_path):
    """What is found in prompts, compared as characters or with the demo model's tokenizer."""

    def find(prompts, model=None):
        return find_divergence(as_units(read_prompts(write(tmp_path / "prompts", prompts)), model))

    return find


def test_a_timestamp_in_front_is_shown_with_the_text_around_it(found):
    divergence = found([stamped(minute) for minute in range(10, 50)])
    assert divergence.unit == "characters"
    assert divergence.before == "Current time: 2026-03-01 14:"
    assert {text[0] for text, _ in divergence.branches} <= set("1234")
    assert divergence.kind == "a date or time"
    assert divergence.same_again > 2000
    finding = divergence_finding(divergence, page_size=64)
    assert finding.name == "prompts-differ-early"
    assert "'Current time: 2026-03-01 14:'" in finding.seen
    assert finding.fix[0].startswith("move a date or time behind")


@pytest.mark.parametrize(
    ("varies", "kind"),
    [
        (["3f2b8c1e-0000-4000-8000-00000000000a", "a12b8c1e-0000-4000-8000-00000000000b"], "a UUID"),
        (["user k29fhx81bq", "user 83hdk2ww0a"], "an identifier"),
        (["ticket 17", "ticket 94"], "a number"),
        (["Today is Monday", "Today is Friday"], "a date or time"),
        (["Dear Ada", "Dear Bob"], None),
    ],
)
def test_what_varies_is_named(found, varies, kind):
    assert found([f"{text}. {RULES}" for text in varies]).kind == kind


def test_prompts_that_share_all_but_the_question_need_nothing(found):
    divergence = found([f"{RULES} Question: {word}?" for word in ("why", "how", "when")])
    assert divergence_finding(divergence, page_size=64) is None
    assert divergence.common >= len(RULES)
    assert describe(divergence).startswith("3 prompts of ")


def test_prompts_that_have_nothing_in_common_need_nothing(found):
    prompts = ["".join(chr(97 + (seed * n * n) % 26) for n in range(900)) for seed in (3, 5, 7, 11)]
    assert divergence_finding(found(prompts), page_size=64) is None


def test_a_few_prompts_of_another_kind_do_not_hide_the_place(found):
    divergence = found([stamped(minute) for minute in range(10, 40)] + ["Translate this.", "Hello"])
    assert divergence.before == "Current time: 2026-03-01 14:"


def test_turns_of_one_conversation_do_not_differ(found):
    turns = [f"{RULES} hello", f"{RULES} hello there, how are you", f"{RULES} hello there, how are you? Fine."]
    divergence = found(turns)
    assert divergence.branches == ()
    assert divergence_finding(divergence, page_size=64) is None
    assert "agree over the first" in describe(divergence)


def test_chats_are_rendered_by_the_template_and_compared_as_tokens(found, demo_model):
    chats = [
        {
            "model": "demo",
            "messages": [
                {"role": "system", "content": f"It is 14:{minute}. {RULES}"},
                {"role": "user", "content": f"Question {minute}"},
            ],
        }
        for minute in range(10, 20)
    ]
    divergence = found([json.dumps(chat) for chat in chats], str(demo_model))
    assert divergence.unit == "tokens"
    assert divergence.before == "<|im_start|>system\nIt is 14:1"
    assert divergence.kind == "a date or time"
    assert divergence_finding(divergence, page_size=64) is not None
    batch = [json.dumps({"custom_id": str(n), "body": chat}) for n, chat in enumerate(chats)]
    assert found(batch, str(demo_model)) == divergence


def test_every_kind_of_line_is_read(tmp_path):
    lines = [
        "plain text",
        '"a JSON string"',
        '{"prompt": "p"}',
        '{"text": "t"}',
        '{"input_ids": [1, 2]}',
        "[3, 4]",
        "42",
        "{not JSON",
    ]
    prompts = read_prompts(write(tmp_path / "prompts", ["", *lines, '[{"role": "user", "content": "c"}]']))
    texts = ["plain text", "a JSON string", "p", "t", [1, 2], [3, 4], "42", "{not JSON"]
    assert prompts == [*texts, {"messages": [{"role": "user", "content": "c"}]}]
    units = as_units(prompts, None)
    assert (units.name, len(units.units)) == ("characters", len(prompts))
    assert "--model" in units.reason


def test_token_ids_need_no_tokenizer(tmp_path):
    prompts = read_prompts(write(tmp_path / "prompts", ["[1, 2, 3]", "[1, 2, 4]"]))
    divergence = find_divergence(as_units(prompts, None))
    assert (divergence.unit, divergence.common, divergence.before) == ("tokens", 2, "1 2")


def test_a_tokenizer_that_is_not_here_is_told(tmp_path):
    prompts = read_prompts(write(tmp_path / "prompts", ["abc", "abd"]))
    units = as_units(prompts, str(tmp_path / "no-model"))
    assert units.name == "characters"
    assert "no-model cannot be loaded here" in units.reason


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "has 1 prompts: give at least 2"),
        (["one", '{"foo": 1}'], "line 2 is no prompt"),
        (["one", "null"], "line 2 is no prompt"),
    ],
)
def test_files_that_hold_no_prompts_are_refused(tmp_path, lines, message):
    with pytest.raises(OptionError, match=message):
        read_prompts(write(tmp_path / "prompts", lines))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        read_prompts(tmp_path / "nothing")
