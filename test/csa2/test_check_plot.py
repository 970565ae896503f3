"""The picture of a check."""

import pytest

from csa2.check.plot import draw
from csa2.check.results import FormatResult

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def row(name):
    return FormatResult(
        format=name,
        variant="rotated",
        bytes_fraction_compressed=0.25,
        bytes_fraction_total=0.3,
        ppl_increase_pct=0.1,
        ppl_se_pct=None,
        ppl_se_blocks="1 block",
        kl_nats=0.01,
        top1_agreement_pct=99,
        copy_recall_pct=None,
        copy_recall_full_pct=None,
        loss_nats_by_position=[0.1, -0.1],
        kl_nats_by_position=[0.01, 0.02],
        documents=[],
    )


@pytest.mark.parametrize("layers", [{}, {"fp4": [0.1, 0.2, 0.05]}])
def test_picture(tmp_path, layers):
    path = tmp_path / "loss.png"
    draw(path, [row("fp4"), row("fp8")], layers, 4096)
    assert path.read_bytes().startswith(b"\x89PNG")
