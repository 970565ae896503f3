"""docs/options.md is what the code says, and the generator notices when it is not."""

from pathlib import Path

from sglang_csa2 import options_doc
from sglang_csa2.args import Csa2ServerArgs, flag_of
from sglang_csa2.refusals import MODELS, OPTIONS
from sglang_csa2.resolve import FORCED

DOCUMENT = Path(__file__).parents[2] / "docs" / "options.md"


def test_document_is_up_to_date():
    assert options_doc.main(["--check", str(DOCUMENT)]) == 0


def test_document_has_every_option_and_refusal():
    text = options_doc.render()
    for field in ("kv_compress", *(name for name in Csa2ServerArgs.__struct_fields__ if name.startswith("csa2_"))):
        assert f"| `{flag_of(field)}` |" in text
    for forced in FORCED:
        assert f"| `{flag_of(forced.field)}` |" in text
    for row in OPTIONS:
        assert f"| `{row.what}` " in text
    for row in MODELS:
        assert row.reason in text


def test_rows_of_tables_have_as_many_cells_as_the_head():
    tables = [block for block in options_doc.render().split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count(" | ") for line in table.strip().splitlines()}) == 1


def test_check_fails_on_another_text_and_says_what_to_do(tmp_path, capsys):
    path = tmp_path / "options.md"
    assert options_doc.main(["--check", str(path)]) == 1
    path.write_text("old")
    assert options_doc.main(["--check", str(path)]) == 1
    assert f"run `python -m sglang_csa2.options_doc {path}`" in capsys.readouterr().err
    assert path.read_text() == "old"
    assert options_doc.main([str(path)]) == 0
    assert options_doc.main(["--check", str(path)]) == 0
