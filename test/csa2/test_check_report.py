"""Rows, report, disagreements and record of the check, from made-up scores."""

import json
import math

import msgspec
import numpy as np
import pytest

from csa2.check.disagreements import first_disagreements
from csa2.check.errors import CheckError
from csa2.check.formats import (
    FORMATS,
    cache_options,
    engine_options,
    parse_formats,
    row_name,
    split_name,
    with_variant,
)
from csa2.check.kept import keep, recall
from csa2.check.metrics import TokenScores
from csa2.check.prompts import Protocol
from csa2.check.record import DocumentEntry, start_record, write_json
from csa2.check.report import render_advice, render_disagreements, render_table
from csa2.check.results import Measured, byte_fractions, make_result

STATS = {"pages": {"bf16": 3, "fp8": 0, "fp4": 9}, "page_bytes": {"bf16": 1600, "fp8": 800, "fp4": 400}}
TOKENS = 128


def made_up(first_choice, logprob):
    """Scores of `TOKENS` times token 7: the first choice is `first_choice` at even positions and 7 elsewhere."""
    top = np.full((TOKENS, 2), 7)
    top[:, 1] = 8
    top[::2, 0] = first_choice
    probabilities = np.tile(np.log([0.5, 0.25]), (TOKENS, 1))
    return TokenScores(np.full(TOKENS, 7), np.full(TOKENS, logprob), top, probabilities)


FULL = Measured((made_up(7, -1.0),) * 3, (made_up(7, -1.0),))
PACKED = Measured((made_up(9, -1.5),) * 3, (made_up(9, -1.0),), (STATS,) * 3)


@pytest.fixture
def row():
    return make_result("fp4", ["a", "b", "c"], FULL, PACKED)


def test_row(row):
    assert row.ppl_increase_pct == pytest.approx(100 * math.expm1(0.5))
    assert row.ppl_se_pct == pytest.approx(0, abs=1e-9)
    assert row.top1_agreement_pct == 50
    assert (row.copy_recall_pct, row.copy_recall_full_pct, row.copy_recall_of_full_pct) == (50, 100, 50)
    assert row.loss_nats_by_position == [0.5, 0.5]
    assert [each.document for each in row.documents] == ["a", "b", "c"]


def test_byte_fractions_come_from_page_sizes_and_counts():
    assert byte_fractions("fp4", [STATS]) == (0.25, (3 * 1600 + 9 * 400) / (12 * 1600))
    assert byte_fractions("bf16", [STATS])[0] == 1


def test_fp32_pages_count_as_bf16():
    stats = {"pages": {"fp32": 3, "fp4": 9}, "page_bytes": {"fp32": 3200, "fp4": 400}}
    assert byte_fractions("fp4", [stats]) == (0.25, (3 * 1600 + 9 * 400) / (12 * 1600))


def test_no_passages_leave_recall_open():
    row = make_result("fp4", ["a"], Measured(FULL.scores[:1], ()), Measured(PACKED.scores[:1], (), (STATS,)))
    assert row.copy_recall_pct is None
    assert row.copy_recall_of_full_pct is None
    assert "- " in render_table([row])


def test_table_names_every_column(row):
    table = render_table([row])
    assert table.splitlines()[1].split()[:6] == ["fp4", "0.2500", "0.438", "+64.87", "0.00", "0.00000"]
    assert "3 documents" in table
    assert "100.0 %" in table


def test_advice_follows_the_order_of_the_source(row):
    text = render_advice([row], row, 90)
    places = [text.index(word) for word in ("calibration data", "ratio", "position handling", "scorer weights")]
    assert places == sorted(places)
    assert "50.00 % is under 90 %" in text


def test_advice_names_a_measured_format_that_passes(row):
    better = make_result("fp8", ["a", "b", "c"], FULL, Measured(FULL.scores, FULL.copies, (STATS,) * 3))
    assert "fp8 reaches the agreement" in render_advice([row, better], row, 90)


def test_disagreements_show_both_choices_in_context():
    document = list(range(100, 100 + 65 + TOKENS))
    found = first_disagreements(
        "a", document, FULL.scores[0], PACKED.scores[0], first_position=65, decode=lambda ids: str(list(ids)), limit=2
    )
    assert [each.position for each in found] == [65, 67]
    first = found[0]
    assert (first.full.token, first.packed.token, first.true_token) == ("[7]", "[9]", "[7]")
    assert first.full.probability == pytest.approx(0.5)
    assert first.margin_nats == pytest.approx(math.log(2))
    assert first.context == str(document[49:65])
    assert "a:65" in render_disagreements({"fp4": found})


def test_record_is_json_with_the_promised_columns(tmp_path):
    entries = [DocumentEntry(name=name, tokens=9, sha256="") for name in "abc"]
    record = start_record(Protocol(context=64, score_tokens=TOKENS), "model", "auto", entries)
    record.add("fp4", FULL, PACKED, [[1] * 300] * 3, str)
    path = tmp_path / "out.json"
    write_json(record, path)
    written = json.loads(path.read_text())
    columns = "format bytes_fraction_compressed bytes_fraction_total ppl_increase_pct ppl_se_pct kl_nats top1_agreement_pct"
    assert {*columns.split(), "copy_recall_pct", "copy_recall_full_pct"} <= written["results"][0].keys()
    assert written["disagreements"]["fp4"][0]["document"] == "a"
    assert "versions" in written["environment"]


def test_formats_are_served_options():
    for name in FORMATS:
        cache_options(name).validate()
        assert all(field.startswith("csa2_") for field in engine_options(name))


def test_shared_pages_take_the_format_under_check():
    for name in FORMATS:
        assert cache_options(name).shared_format == "tail"


def test_list_of_formats():
    assert parse_formats("fp4, int4,fp4") == ("fp4", "int4")
    for text, said in (("fp5", "'fp5' is unknown"), (" ,", "names no format")):
        with pytest.raises(CheckError, match=said):
            parse_formats(text)


def test_a_variant_is_a_row_beside_its_format():
    names = with_variant(("bf16", "fp4", "csa2-4x"), "separated")
    assert names == ("bf16", "fp4", "fp4 (separated)", "csa2-4x", "csa2-4x (separated)")
    assert with_variant(("bf16", "fp4"), "rotated") == ("bf16", "fp4")
    for name in names:
        assert row_name(*split_name(name)) == name
    assert cache_options("csa2-4x (separated)") == msgspec.structs.replace(cache_options("csa2-4x"), rope="separated")
    options = engine_options("csa2-4x (separated)", "folder")
    assert options == {**engine_options("csa2-4x", "folder"), "csa2_rope": "separated"}
    with pytest.raises(CheckError, match="is unknown"):
        parse_formats("csa2-4x (separated)")


def test_rows_and_table_name_the_variant(row):
    separated = make_result("fp4 (separated)", ["a", "b", "c"], FULL, PACKED)
    assert (row.format, row.variant, row.name) == ("fp4", "rotated", "fp4")
    assert (separated.format, separated.variant, separated.name) == ("fp4", "separated", "fp4 (separated)")
    lines = render_table([row, separated]).splitlines()
    assert lines[1].split()[:2] == ["fp4", "0.2500"]
    assert lines[2].split()[:3] == ["fp4", "(separated)", "0.2500"]
    assert "fp4 (separated): agreement 50.00 %" in render_advice([row, separated], separated, 90)


def test_kept_scores_come_back_as_they_were(tmp_path):
    path = tmp_path / "full"
    for measured in (FULL, Measured(FULL.scores, ())):
        keep(path, measured, {"seed": 1})
        again = recall(path, {"seed": 1})
        for before, after in ((measured.scores, again.scores), (measured.copies, again.copies)):
            assert len(before) == len(after)
            for left, right in zip(before, after, strict=True):
                for part in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
                    assert np.array_equal(getattr(left, part), getattr(right, part))


def test_kept_scores_of_something_else_are_refused(tmp_path):
    path = tmp_path / "full"
    keep(path, FULL, {"seed": 1, "model": "a"})
    with pytest.raises(CheckError, match="another model"):
        recall(path, {"seed": 1, "model": "b"})
    path.write_text("hello")
    with pytest.raises(CheckError, match="holds no scores"):
        recall(path, {})
