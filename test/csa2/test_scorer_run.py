"""Training the scorer in `csa2 calibrate`: the choice, the artefact, interruptions."""

import json
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import DIM, GROUPS, HEADS, LAYERS, write_text, write_tiny_llama

from csa2 import cli
from csa2.calibrate import scorer_run, scorer_training
from csa2.calibrate.artefact import CONFIG, TENSORS, Calibration, load, save
from csa2.calibrate.fingerprint import ModelShape
from csa2.calibrate.run import CalibrateOptions, calibrate, scorer_config
from csa2.calibrate.scorer_run import FOLDER, Candidates, ScorerOptions, split_pieces
from csa2.calibrate.scorer_training import hidden_units, parameters
from csa2.calibrate.unfinished import UnfinishedWork
from csa2.codec.scorer import SCALARS, Scorer
from csa2.errors import CalibrationError

SMALL = {"samples": 2, "sample_tokens": 128, "budget_samples": 1, "budget_tokens": 384, "scorer_samples": 5}
TOKENS = 384
SHAPE = ModelShape(LAYERS, HEADS, GROUPS, DIM)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt", 6 * TOKENS)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(scorer_training, "EPOCHS", 1)


def options(model: Path, text: Path, out: Path, **more) -> CalibrateOptions:
    return CalibrateOptions(model=model, texts=(text,), out=out, scorer_tokens=TOKENS, **SMALL, **more)


@pytest.fixture(scope="module")
def made(model, text, tmp_path_factory) -> tuple[Calibration, Path]:
    """A calibration with an mlp."""
    out = tmp_path_factory.mktemp("out") / "calibration"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer_training, "EPOCHS", 1)
        return calibrate(options(model, text, out, scorer="mlp")), out


def same(one: Scorer | None, other: Scorer | None) -> bool:
    assert one is not None
    assert other is not None
    return all(torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(Scorer))


def test_the_artefact_holds_the_scorer_and_says_what_it_is(made):
    calibration, out = made
    again = load(out)
    assert same(again.scorer, calibration.scorer)
    config = again.config.scorer
    assert config is not None
    assert (config.kind, config.asked_for) == ("mlp", "mlp")
    assert config.parameters == parameters(SHAPE, hidden_units(SHAPE)) == again.scorer.parameters
    assert (config.samples, config.held_out_samples, config.sample_tokens) == (4, 1, TOKENS)
    assert set(config.held_out_errors) == {"none", "mlp"}
    card = (out / "README.md").read_text()
    assert f"kept mlp, {config.parameters} weights" in card
    assert "none 0." in card
    assert not (out / FOLDER).exists()


def test_a_rank_gets_the_scorer_of_its_heads(made):
    scorer = made[0].of(range(1, 2), range(1, 2)).scorer
    assert same(scorer, made[0].scorer.map(lambda tensor: tensor[1, 1:2]))
    assert scorer.weights.shape == (1, 2 * DIM + SCALARS, 1 + hidden_units(SHAPE))
    everything = made[0].of(range(LAYERS), range(GROUPS)).scorer
    assert torch.equal(everything.outer[1], made[0].scorer.outer[0, 1])


def test_none_is_trained_unless_asked_for(model, text, tmp_path):
    calibration = calibrate(options(model, text, tmp_path))
    assert (calibration.scorer, calibration.config.scorer) == (None, None)
    assert "none was trained" in (tmp_path / "README.md").read_text()


def test_a_regression_can_be_stored(model, text, tmp_path):
    calibration = calibrate(options(model, text, tmp_path, scorer="ridge"))
    assert same(load(tmp_path).scorer, calibration.scorer)
    assert calibration.scorer.outer.shape == (LAYERS, GROUPS, 0)
    assert calibration.config.scorer.hidden_units == 0


def test_an_interrupted_run_goes_on_and_ends_the_same(made, model, text, tmp_path, monkeypatch):
    """Stopped while reading and while training; nothing that was finished is done again."""
    asked = options(model, text, tmp_path / "out", scorer="mlp")
    done: list[str] = []
    whole_save, whole_train = UnfinishedWork.save, scorer_run._train_layer
    stop_after = {"part": "piece-001"}

    def saving(self, part, tensors):
        whole_save(self, part, tensors)
        done.append(part)
        if part == stop_after["part"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(UnfinishedWork, "save", saving)
    for part in ("piece-001", "layer-000"):
        stop_after["part"] = part
        with pytest.raises(KeyboardInterrupt):
            calibrate(asked)
        assert not (tmp_path / "out" / TENSORS).exists()
    stop_after["part"] = ""
    layers = []
    monkeypatch.setattr(scorer_run, "_train_layer", lambda *args: layers.append(args[-1]) or whole_train(*args))
    calibration = calibrate(asked)
    assert layers == [1]
    assert len(done) == len(set(done)) == 5 + LAYERS
    assert same(calibration.scorer, made[0].scorer)
    assert calibration.config == made[0].config
    assert not (tmp_path / "out" / FOLDER).exists()


def test_a_killed_write_is_not_taken_for_a_part(tmp_path):
    work = UnfinishedWork(tmp_path / "work", ScorerOptions())
    (tmp_path / "work" / "layer-000.safetensors.partial").write_bytes(b"half")
    assert not UnfinishedWork(tmp_path / "work", ScorerOptions()).has("layer-000")
    work.save("layer-000", {"a": torch.ones(2), "b": torch.zeros(0)})
    again = UnfinishedWork(tmp_path / "work", ScorerOptions())
    assert again.has("layer-000")
    assert again.load("layer-000")["b"].shape == (0,)
    assert list(again.load("layer-000", ["a"])) == ["a"]


def test_parts_of_other_work_are_not_used(tmp_path, capsys):
    work = UnfinishedWork(tmp_path / "work", ScorerOptions(seed=1))
    work.save("layer-000", {"a": torch.ones(2)})
    assert not UnfinishedWork(tmp_path / "work", ScorerOptions(seed=2)).has("layer-000")
    assert "starting again" in capsys.readouterr().err


def test_a_damaged_part_is_named(tmp_path):
    work = UnfinishedWork(tmp_path / "work", ScorerOptions())
    (tmp_path / "work" / "layer-000.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CalibrationError, match=r"layer-000.safetensors cannot be read.*start again"):
        work.load("layer-000")
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="cannot be written"):
        UnfinishedWork(tmp_path / "file" / "work", ScorerOptions())


def candidates(**errors: float) -> Candidates:
    heads = (LAYERS, GROUPS)
    scorer = Scorer(torch.zeros(*heads, 2 * DIM + SCALARS, 1), torch.zeros(*heads, 1), torch.zeros(*heads, 0))
    found = {kind: torch.tensor([[[error]], [[2 * error]]]).expand(2, LAYERS, 3) for kind, error in errors.items()}
    return Candidates({kind: scorer for kind in errors if kind != "none"}, found, 4, 3)


@pytest.mark.parametrize(
    ("errors", "best"),
    [
        ({"none": 0.05, "ridge": 0.04, "mlp": 0.03}, "mlp"),
        ({"none": 0.05, "ridge": 0.03, "mlp": 0.04}, "ridge"),
        ({"none": 0.03, "ridge": 0.05, "mlp": 0.04}, "none"),
        ({"none": 0.03, "ridge": 0.03, "mlp": 0.03}, "none"),
    ],
)
def test_the_best_on_text_held_out_is_kept(errors, best):
    config = scorer_config(candidates(**errors), ScorerOptions(scorer="best"))
    assert (config.kind, config.asked_for) == (best, "best")
    assert config.held_out_errors["none"] == pytest.approx((errors["none"], 2 * errors["none"]))
    assert scorer_config(candidates(**errors), ScorerOptions(scorer="ridge")).kind == "ridge"


def test_the_card_says_when_no_scorer_is_better(made, tmp_path):
    config = scorer_config(candidates(none=0.03, ridge=0.05, mlp=0.04), ScorerOptions(scorer="best"))
    changed = msgspec.structs.replace(made[0].config, scorer=config)
    save(msgspec.structs.replace(made[0], config=changed, scorer=None), tmp_path)
    assert "kept none, since no trained one is better" in (tmp_path / "README.md").read_text()
    assert load(tmp_path).scorer is None
    assert load(tmp_path).of(range(LAYERS), range(GROUPS)).scorer is None


def test_what_is_held_out_is_in_no_training_piece():
    documents = [list(range(start, start + 11 * TOKENS)) for start in (0, 100_000)]
    documents.append(list(range(200_000, 200_000 + TOKENS)))
    asked = ScorerOptions(scorer_samples=20, scorer_tokens=TOKENS, seed=3)
    training, held_out = split_pieces(documents, asked)
    assert (len(training), len(held_out)) == (16, 4)
    tokens = [token for piece in training + held_out for token in piece]
    assert len(tokens) == len(set(tokens)) == 20 * TOKENS
    # The last fifth of each long document.
    assert {piece[0] % 100_000 // TOKENS for piece in held_out} == {9, 10}
    assert split_pieces(documents, asked) == (training, held_out)
    assert split_pieces(documents, msgspec.structs.replace(asked, seed=4)) != (training, held_out)


def test_short_text_is_refused(model, tmp_path):
    short = write_text(tmp_path / "short.txt", 2 * TOKENS - 1)
    with pytest.raises(CalibrationError, match=r"no file has 768 tokens.*--scorer-tokens, or --scorer none"):
        calibrate(options(model, short, tmp_path / "out", scorer="mlp"))


@pytest.mark.parametrize("damage", ["missing", "shape", "nan"])
def test_a_damaged_scorer_is_refused(made, tmp_path, damage):
    tensors = load_file(made[1] / TENSORS)
    if damage == "missing":
        del tensors["scorer.outer"]
    elif damage == "shape":
        tensors["scorer.weights"] = tensors["scorer.weights"][:1].contiguous()
    else:
        tensors["scorer.offsets"][0, 0, 0] = float("nan")
    save(made[0], tmp_path)
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(CalibrationError, match="is damaged"):
        load(tmp_path)


def test_the_command(model, text, tmp_path, capsys):
    arguments = ["calibrate", "--model", str(model), "--text", str(text), "--out", str(tmp_path / "out")]
    for name, value in SMALL.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    assert cli.main([*arguments, "--scorer-tokens", str(TOKENS), "--scorer", "best"]) == 0
    config = json.loads((tmp_path / "out" / CONFIG).read_text())["scorer"]
    assert config["asked_for"] == "best"
    assert set(config["held_out_errors"]) == {"none", "ridge", "mlp"}
    assert "scorer, training" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--scorer", "guess"])
