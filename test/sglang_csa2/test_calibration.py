"""The calibration of a server: compared with the model at the start, cut to a rank."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

import csa2
from csa2.calibrate.artefact import ScorerConfig, load, save
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation
from csa2.codec.scorer import SCALARS, Scorer
from csa2.errors import CalibrationError
from csa2.options import CacheOptions
from sgl_kernels.page_layout import PageGeometry
from sglang_csa2 import calibration

SHIPPED = Path(csa2.__file__).parent / "calibrations" / "smollm2-135m-instruct"
NEOX = make_rotation(64, neox=True)
OPTIONS = CacheOptions(ratio="4", calibration=str(SHIPPED))


def geometry(layers: int = 30, heads: int = 3, dim: int = 64) -> PageGeometry:
    return PageGeometry(layers, heads, dim, 64, torch.bfloat16)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    ranks(monkeypatch, 0, 1)


def ranks(monkeypatch, rank: int, size: int) -> None:
    parallel = SimpleNamespace(attn_tp_rank=rank, attn_tp_size=size)
    monkeypatch.setattr(calibration, "_parallel", lambda: parallel)


def test_a_rank_gets_its_layers_and_heads(monkeypatch):
    everything = load(SHIPPED)
    order, losses = everything.channel_order, everything.losses
    whole = calibration.head_calibration(OPTIONS, geometry(), 0, NEOX)
    assert whole.orders == order.flatten(0, 1).tolist()
    assert torch.equal(whole.losses.losses, losses.flatten(1))
    ranks(monkeypatch, 2, 3)
    part = calibration.head_calibration(OPTIONS, geometry(10, 1), 20, NEOX)
    assert part.orders == order[20:, 2].tolist()
    assert torch.equal(part.losses.losses, losses[:, 20:, 2])
    ranks(monkeypatch, 5, 6)  # more ranks than heads: two share one
    assert calibration.head_calibration(OPTIONS, geometry(30, 1), 0, NEOX).orders == order[:, 2].tolist()


def test_a_rank_gets_the_scorer_of_its_heads(monkeypatch, tmp_path, caplog):
    """From the folder to the codec that seals."""
    shipped = load(SHIPPED)
    heads, features, units = (30, 3), 2 * 64 + SCALARS, 2
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(*shape, generator=random) for shape in ((*heads, features, 1 + units), (*heads, 1 + units))]
    scorer = Scorer(*weights, torch.randn(*heads, units, generator=random)).map(lambda tensor: tensor.bfloat16().float())
    about = ScorerConfig(
        kind="mlp",
        asked_for="mlp",
        hidden_units=units,
        parameters=scorer.parameters,
        samples=1,
        held_out_samples=1,
        sample_tokens=384,
        ratios=(2, 4),
        held_out_errors={"none": (0.2, 0.3), "mlp": (0.1, 0.2)},
    )
    config = msgspec.structs.replace(shipped.config, scorer=about)
    save(msgspec.structs.replace(shipped, config=config, scorer=scorer), tmp_path)
    options = CacheOptions(ratio="4", calibration=str(tmp_path))
    ranks(monkeypatch, 1, 3)
    part = geometry(10, 1)
    with caplog.at_level(logging.INFO):
        known = calibration.head_calibration(options, part, 20, NEOX)
    assert "trained scorer" in caplog.text
    codec, _ = codec_and_ladder(options, part, NEOX, known)
    assert torch.equal(codec.scorer.weights, scorer.weights[20:, 1])
    assert torch.equal(codec.scorer.offsets, scorer.offsets[20:, 1])
    assert torch.equal(codec.scorer.outer, scorer.outer[20:, 1])
    ranks(monkeypatch, 5, 6)  # more ranks than heads: two share one
    shared = calibration.head_calibration(options, geometry(30, 1), 0, NEOX)
    assert torch.equal(shared.scorer.weights, scorer.weights[:, 2])


@pytest.mark.parametrize("other", [geometry(31), geometry(heads=4), geometry(dim=128)])
def test_another_shape_is_refused(other):
    with pytest.raises(CalibrationError, match="30 layers of 3 KV heads with 64 channels"):
        calibration.head_calibration(OPTIONS, other, 0, NEOX)


def test_other_rotary_pairs_are_refused():
    with pytest.raises(CalibrationError, match="other rotary pairs"):
        calibration.head_calibration(OPTIONS, geometry(), 0, make_rotation(64, neox=False))


@pytest.mark.parametrize(("ratio", "warnings"), [("1", 0), ("2", 1), ("8", 1)])
def test_without_a_calibration_the_log_says_what_is_kept(caplog, ratio, warnings):
    with caplog.at_level(logging.WARNING):
        assert calibration.head_calibration(CacheOptions(ratio=ratio), geometry(), 0, NEOX) is None
    assert len([record for record in caplog.records if "slowest rotary pairs" in record.message]) == warnings


def test_a_wrong_folder_is_refused_before_anything_is_spawned(tmp_path):
    with pytest.raises(CalibrationError, match="holds no calibration"):
        calibration.check_calibration(CacheOptions(calibration=str(tmp_path)), "some/model")
    calibration.check_calibration(CacheOptions(), "some/model")
    calibration.check_calibration(OPTIONS, "some/model")  # a name on a hub: compared when the model is loaded


def test_the_calibration_of_another_model_is_refused(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "calibration")
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}'
    )
    with pytest.raises(CalibrationError, match=r"made for smollm2-135m-instruct.*12 layers"):
        calibration.check_calibration(CacheOptions(calibration=str(tmp_path / "calibration")), str(tmp_path))
