"""`csa2 calibrate`: what it measures, what it writes, and which model it belongs to."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_llama import DIM, GROUPS, HEADS, LAYERS, write_text, write_tiny_llama

import csa2
from csa2 import cli
from csa2.calibrate.artefact import CONFIG, TENSORS, Calibration, check_model, load, save
from csa2.calibrate.capture import CapturedModel
from csa2.calibrate.fingerprint import ModelShape, model_shape, weights_digest
from csa2.calibrate.run import CalibrateOptions, calibrate, draw_samples
from csa2.calibrate.sensitivity import budget_split, layer_losses
from csa2.calibrate.statistics import channel_order, channel_pairs, pair_scores
from csa2.codec.budgets import menu
from csa2.codec.channels import Rotation, make_rotation
from csa2.demo_model import ensure_demo_model
from csa2.errors import CalibrationError, OptionError

SMALL = {"samples": 3, "sample_tokens": 128, "budget_samples": 2, "budget_tokens": 384}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt", 1000)


@pytest.fixture(scope="module")
def made(model, text, tmp_path_factory) -> tuple[Calibration, Path]:
    out = tmp_path_factory.mktemp("out") / "calibration"
    options = CalibrateOptions(model=model, texts=(text,), out=out, **SMALL, seed=5)
    return calibrate(options), out


def test_the_pair_that_is_asked_for_comes_first():
    """Queries look at one rotary pair only; keys vary in all of them."""
    random = torch.Generator().manual_seed(0)
    pairs = channel_pairs(make_rotation(DIM, neox=True), DIM)
    keys = torch.randn(GROUPS, 256, DIM, generator=random)
    queries = torch.zeros(HEADS, 256, DIM)
    queries[:2, :, [5, 5 + DIM // 2]] = 1.0
    queries[2:, :, [9, 9 + DIM // 2]] = 1.0
    scores = pair_scores(queries, keys, pairs)
    order = channel_order(scores, pairs)
    assert order[:, :2].tolist() == [[5, 5 + DIM // 2], [9, 9 + DIM // 2]]
    assert bool((scores.sort(-1).values[:, :-1] == 0).all())


def test_what_the_page_mean_removes_counts_for_nothing():
    pairs = channel_pairs(make_rotation(DIM, neox=True), DIM)
    keys = torch.randn(GROUPS, 256, DIM, generator=torch.Generator().manual_seed(0))
    keys[..., [3, 3 + DIM // 2]] = 7.0
    scores = pair_scores(torch.ones(HEADS, 256, DIM) * 0.1, keys, pairs)
    assert scores.argmin(-1).tolist() == [3, 3]


@pytest.mark.parametrize("rotation", [make_rotation(32, neox=True), make_rotation(16, neox=False), Rotation(())])
def test_pairs_hold_every_channel_once(rotation):
    pairs = channel_pairs(rotation, DIM)
    assert sorted(pairs.flatten().tolist()) == list(range(DIM))
    assert [tuple(pair) for pair in pairs[: len(rotation.pairs)].tolist()] == list(rotation.pairs)


def test_it_writes_what_it_returns(made, model):
    calibration, out = made
    again = load(out)
    assert torch.equal(again.channel_order, calibration.channel_order)
    assert torch.equal(again.losses, calibration.losses)
    assert again.losses.shape == (len(again.config.menu), LAYERS, GROUPS)
    assert again.config.menu == menu(DIM)
    assert again.config == calibration.config
    assert again.channel_order.shape == (LAYERS, GROUPS, DIM)
    assert again.config.shape == ModelShape(LAYERS, HEADS, GROUPS, DIM)
    assert (again.config.samples, again.config.sample_tokens, again.config.seed) == (3, 128, 5)
    assert again.config.weights_digest == weights_digest(model)
    assert "torch" in again.config.versions
    assert model.name in (out / "README.md").read_text()


def test_the_same_seed_gives_the_same_calibration(made, model, text, tmp_path):
    again = calibrate(CalibrateOptions(model=model, texts=(text,), out=tmp_path, **SMALL, seed=5))
    assert torch.equal(again.channel_order, made[0].channel_order)
    assert torch.equal(again.losses, made[0].losses)
    other = calibrate(CalibrateOptions(model=model, texts=(text,), out=tmp_path, **SMALL, seed=6))
    assert not torch.equal(other.channel_order, made[0].channel_order)
    assert not torch.equal(other.losses, made[0].losses)


def test_heads_of_one_rank(made):
    order, losses = made[0].channel_order, made[0].losses
    one = made[0].of(range(1, 2), range(1, 2))
    assert one.orders == [order[1, 1].tolist()]
    assert torch.equal(one.losses.losses, losses[:, 1, 1:])
    assert made[0].of(range(2), range(2)).orders == order.flatten(0, 1).tolist()


def test_a_calibration_of_this_model_is_accepted(made, model):
    check_model(made[0], model, source="here")


def test_another_shape_is_refused_by_name(made, model, tmp_path):
    shutil.copytree(model, tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(CalibrationError, match=rf"(?s){model.name}.*2 layers.*9 layers.*csa2 calibrate"):
        check_model(made[0], tmp_path / "other", source="here")


def test_other_weights_are_refused_by_name(made, model, tmp_path):
    shutil.copytree(model, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    data[int.from_bytes(data[:8], "little") + 8] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CalibrationError, match="same shape but other weights"):
        check_model(made[0], tmp_path / "other", source="here")


def test_the_digest_does_not_depend_on_the_files(model, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "b.safetensors")
    assert weights_digest(tmp_path) == weights_digest(model)
    assert weights_digest(tmp_path / "nowhere") is None


def test_a_damaged_calibration_is_refused(made, tmp_path):
    calibration, out = made
    with pytest.raises(CalibrationError, match="holds no calibration"):
        load(tmp_path)
    folder = tmp_path / "damaged"
    shutil.copytree(out, folder)
    (folder / TENSORS).write_bytes(b"no tensors")
    with pytest.raises(CalibrationError, match="cannot be read"):
        load(folder)
    twice, broken = calibration.channel_order.clone(), calibration.losses.clone()
    twice[0, 0, 0] = twice[0, 0, 1]
    broken[0, 0, 0] = torch.nan
    for changed in ({"channel_order": twice}, {"losses": broken}, {"losses": calibration.losses[1:]}):
        save(msgspec.structs.replace(calibration, **changed), folder)
        with pytest.raises(CalibrationError, match="is damaged"):
            load(folder)
    config = msgspec.structs.replace(calibration.config, format_version=99)
    save(msgspec.structs.replace(calibration, config=config), folder)
    with pytest.raises(CalibrationError, match="version 99"):
        load(folder)
    (folder / CONFIG).write_text("{}")
    with pytest.raises(CalibrationError, match="cannot be read"):
        load(folder)


def test_samples_do_not_overlap_and_follow_the_seed():
    documents = [list(range(1000)), list(range(1000, 1100))]
    samples = draw_samples(documents, 5, 128, 3, "--sample-tokens")
    assert len(samples) == 5
    assert all(len(sample) == 128 for sample in samples)
    assert len({token for sample in samples for token in sample}) == 5 * 128
    assert samples == draw_samples(documents, 5, 128, 3, "--sample-tokens")
    with pytest.raises(CalibrationError, match=r"too short: no file has 128 tokens.*--sample-tokens"):
        draw_samples([list(range(127))], 5, 128, 3, "--sample-tokens")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 0),
        ("sample_tokens", 127),
        ("budget_samples", 0),
        ("budget_tokens", 200),
        ("scorer", "guess"),
        ("scorer_samples", 1),
        ("scorer_tokens", 383),
    ],
)
def test_options_out_of_range(field, value):
    options = CalibrateOptions(model=Path(), texts=(), out=Path())
    with pytest.raises(OptionError, match=f"--{field.replace('_', '-')} {value}"):
        msgspec.structs.replace(options, **{field: value}).validate()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match=r"has no config.json"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(CalibrationError, match="does not describe"):
        model_shape(tmp_path)


def test_the_command(model, text, tmp_path, capsys):
    budgets = ["--budget-samples", "1", "--budget-tokens", "384"]
    arguments = ["calibrate", "--model", str(model), "--text", str(text), "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--samples", "2", "--sample-tokens", "128", *budgets]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == str(tmp_path / "out")
    assert "only 2 samples" in captured.err
    assert load(tmp_path / "out").config.samples == 2
    assert cli.main([*arguments[:2], str(tmp_path), *arguments[3:]]) == 1
    assert "csa2 calibrate failed" in capsys.readouterr().err


def test_the_calibration_that_ships_belongs_to_the_demo_model():
    folder = Path(csa2.__file__).parent / "calibrations" / "smollm2-135m-instruct"
    calibration = load(folder)
    check_model(calibration, Path(ensure_demo_model(None, say=print)), source=str(folder))
    assert calibration.config.samples >= 128
    assert calibration.config.budget_samples >= 8


def test_a_head_that_nothing_depends_on_loses_nothing(model, text):
    """The loss is that of the predictions: a head whose output goes nowhere may lose all it likes."""
    captured = CapturedModel(model)
    attention = captured.model.model.layers[1].self_attn
    attention.o_proj.weight[:, : HEADS // GROUPS * DIM] = 0
    tokens = captured.encode(text.read_text())[:384]
    split = budget_split(len(tokens))
    layers = captured.capture(tokens, split.context)
    gradients = captured.output_gradients(tokens, layers, seed=0)
    orders = [list(range(DIM))] * GROUPS
    rotation = make_rotation(DIM, neox=True)
    losses = layer_losses(layers[1], gradients[1], split, menu(DIM), rotation, orders)
    assert losses.shape == (len(menu(DIM)), GROUPS)
    assert bool((losses[:, 0] == 0).all())
    assert bool((losses[:, 1] > 0).all())
