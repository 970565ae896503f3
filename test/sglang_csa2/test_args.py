"""The options are real ServerArgs fields: parsed, documented, published, pickled, validated before a process starts."""

import pickle

import msgspec
import pytest
import torch
from resolving import parse, resolve, upstream, write_model

from csa2.calibrate.artefact import FORMAT_VERSION, Calibration, CalibrationConfig, save
from csa2.calibrate.fingerprint import ModelShape
from csa2.errors import CalibrationError, IntegrityError, OptionError
from csa2.options import CacheOptions
from sglang_csa2 import plugin
from sglang_csa2.args import (
    CONFIG_NAMESPACE,
    Csa2ServerArgs,
    enabled,
    enabled_here,
    options_from,
    options_here,
)

ALL_OPTIONS = {
    "csa2_arena_size": "188MB",
    "csa2_ratio": "4",
    "csa2_hot_tokens": 64,
    "csa2_warm_tokens": 512,
    "csa2_shared_format": "k8v4",
    "csa2_tail_format": "ratio",
    "csa2_kv_format": "int4",
    "csa2_key_scale": "channel",
    "csa2_protect_tokens": 128,
    "csa2_high_watermark": 0.9,
    "csa2_low_watermark": 0.5,
    "csa2_adjust_interval": 32,
    "csa2_guard": 0.001,
    "csa2_guard_min": 0.8,
    "csa2_documents": "documents",
    "csa2_calibration": "calibration",
    "csa2_rope": "separated",
    "csa2_impl": "reference",
    "csa2_pack_weights": "layers",
}
ALL_FLAGS = [part for name, value in ALL_OPTIONS.items() for part in ("--" + name.replace("_", "-"), str(value))]
CHANGED = CacheOptions(**{name.removeprefix("csa2_"): value for name, value in ALL_OPTIONS.items()})


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """A model, and where the tests run a calibration of it."""
    shape = ModelShape(num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=64)
    config = CalibrationConfig(
        format_version=FORMAT_VERSION,
        model_name="llama",
        shape=shape,
        weights_digest=None,
        data_digest="",
        samples=1,
        sample_tokens=128,
        budget_samples=1,
        budget_tokens=384,
        seed=0,
        menu=(),
        versions={},
    )
    order = torch.arange(64, dtype=torch.int16).expand(2, 1, 64)
    save(Calibration(config=config, channel_order=order, losses=torch.zeros(0, 2, 1)), tmp_path / "calibration")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    return str(write_model(tmp_path / "llama"))


@pytest.fixture
def published():
    """Publishing replaces a process-wide context: put the old one back."""
    from sglang.srt.runtime_context import publish, restore_context, snapshot_context

    before = snapshot_context()
    yield lambda record: publish(record, role="test")
    restore_context(before)


def test_every_cache_option_is_a_field_with_its_default():
    record = Csa2ServerArgs(model_path="dummy")
    assert msgspec.structs.asdict(options_from(record)) == msgspec.structs.asdict(CacheOptions())
    assert set(ALL_OPTIONS) == {f"csa2_{name}" for name in CacheOptions.__struct_fields__}


def test_positional_order_of_server_args_is_unchanged():
    names = Csa2ServerArgs.__struct_fields__
    ours = {"kv_compress", *ALL_OPTIONS}
    base = Csa2ServerArgs.__mro__[1].__struct_fields__
    assert tuple(name for name in names if name not in ours) == base


def test_command_line(llama):
    record = parse("--model-path", llama, "--kv-compress", "csa2", *ALL_FLAGS)
    assert type(record) is upstream.ServerArgs is Csa2ServerArgs
    assert enabled(record)
    assert options_from(record) == CHANGED
    assert "--csa2-hot-tokens 64" in record.launch_command


def test_yaml_config_and_command_line_wins(llama, tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("kv-compress: csa2\ncsa2-ratio: 8\ncsa2-hot-tokens: 64\ncsa2-warm-tokens: 256\n")
    record = parse("--model-path", llama, "--config", str(config), "--csa2-warm-tokens", "2048")
    assert enabled(record)
    assert options_from(record) == CacheOptions(ratio="8", hot_tokens=64, warm_tokens=2048)


def test_engine_keywords_may_use_numbers():
    record = Csa2ServerArgs(model_path="dummy", kv_compress="csa2", csa2_ratio=2, csa2_arena_size=10**9)
    assert options_from(record) == CacheOptions(ratio="2", arena_size="1000000000")
    assert options_from(record).arena_bytes == 10**9


def test_engine_builds_our_record():
    from sglang.srt.entrypoints.engine import Engine

    # Imported after the plugin loaded, so the class attribute was made from the replaced class.
    assert Engine.server_args_class is Csa2ServerArgs


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--kv-compress {csa2}", "--csa2-arena-size", "--csa2-ratio {auto,1,2,4,8}", "--csa2-hot-tokens",
                 "--csa2-warm-tokens", "--csa2-shared-format {bf16,fp8,k8v4,fp4,tail}", "--csa2-kv-format {fp4,int4}",
                 "--csa2-tail-format {ratio,bf16,fp8,k8v4}", "--csa2-protect-tokens", "--csa2-calibration",
                 "--csa2-impl {auto,reference,cpu,cuda}"):  # fmt: skip
        assert flag in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--kv-compress", "kivi"],
        ["--csa2-ratio", "3"],
        ["--csa2-kv-format", "nf4"],
        ["--csa2-tail-format", "fp4"],
        ["--csa2-hot-tokens", "many"],
        ["--csa2-protect-tokens", "1.5"],
    ],
    ids=lambda argv: argv[0],
)
def test_wrong_choice_is_an_argparse_error(argv, llama, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--model-path", llama, *argv)
    assert ended.value.code == 2
    assert f"argument {argv[0]}: invalid" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--csa2-low-watermark", "0.9"], "--csa2-low-watermark 0.9 and --csa2-high-watermark 0.8 do not fit"),
        (["--csa2-ratio", "4", "--csa2-tail-format", "fp8"], "--csa2-tail-format fp8 and --csa2-ratio 4 both say"),
        (["--csa2-protect-tokens", "-64"], "--csa2-protect-tokens -64 is out of range"),
        (["--csa2-impl", "cuda"], "--csa2-impl cuda needs a CUDA device, and torch sees none"),
        (["--csa2-arena-size", "lots"], "--csa2-arena-size 'lots' is not a size"),
        (["--csa2-hot-tokens", "-1"], "--csa2-hot-tokens -1 is out of range"),
        (["--csa2-hot-tokens", "2000"], "--csa2-warm-tokens 1024 is smaller than --csa2-hot-tokens 2000"),
        (["--device", "cuda"], "--kv-compress csa2 on cuda is served by kernels that have"),
        (["--device", "xpu:0"], "--kv-compress csa2 on xpu is not available"),
    ],
)
def test_unusable_value_is_refused_before_anything_starts(argv, message, llama):
    with pytest.raises(OptionError) as refused:
        resolve("--model-path", llama, "--kv-compress", "csa2", *argv)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"csa2_hot_tokens": "128"}, "--csa2-hot-tokens '128' is not a whole number"),
        ({"csa2_warm_tokens": True}, "--csa2-warm-tokens True is not a whole number"),
        ({"csa2_protect_tokens": 64.0}, "--csa2-protect-tokens 64.0 is not a whole number"),
        ({"csa2_tail_format": "fp4"}, "--csa2-tail-format 'fp4' is unknown"),
        ({"csa2_ratio": 3}, "--csa2-ratio '3' is unknown"),
        ({"csa2_kv_format": "nf4"}, "--csa2-kv-format 'nf4' is unknown"),
        ({"kv_compress": "kivi"}, "--kv-compress 'kivi' is unknown"),
        ({"kv_compress": None, "csa2_impl": "reference"}, "--csa2-impl reference does nothing without --kv-compress"),
    ],
)
def test_engine_keywords_are_checked_like_the_command_line(keywords, message):
    with pytest.raises(OptionError) as refused:
        Csa2ServerArgs(**{"model_path": "dummy", "device": "cpu", "kv_compress": "csa2", **keywords}).resolve_once()
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("ratio", ["1", "2", "4", "8"])
def test_served_ratios_resolve(ratio, llama):
    record = resolve("--model-path", llama, "--kv-compress", "csa2", "--csa2-ratio", ratio)
    assert options_from(record).ratio == ratio


def test_a_calibration_that_is_not_there_or_of_another_model_is_refused(llama, tmp_path):
    with pytest.raises(CalibrationError, match="nowhere holds no calibration"):
        resolve("--model-path", llama, "--kv-compress", "csa2", "--csa2-calibration", "nowhere")
    other = write_model(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(CalibrationError, match=r"was made for llama \(2 layers"):
        resolve("--model-path", str(other), "--kv-compress", "csa2", "--csa2-calibration", "calibration")


@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_option_without_the_flag_is_refused_by_name(name, llama):
    flag, value = "--" + name.replace("_", "-"), ALL_OPTIONS[name]
    if value == getattr(CacheOptions(), name.removeprefix("csa2_")):
        assert not enabled(resolve("--model-path", llama, flag, str(value)))  # the default changes nothing
        return
    with pytest.raises(OptionError, match=f"{flag} {value} does nothing without --kv-compress csa2"):
        resolve("--model-path", llama, flag, str(value))


@pytest.mark.parametrize("flag", ["--attention-backend", "--decode-attention-backend", "--radix-cache-backend"])
def test_our_backends_alone_are_refused(flag, llama):
    with pytest.raises(OptionError, match=f"{flag} csa2 works only as a part of --kv-compress csa2"):
        resolve("--model-path", llama, flag, "csa2")


def test_device_left_out_becomes_cpu(llama):
    assert resolve("--model-path", llama).resolved_dict()["device"] == "cpu"
    assert resolve("--model-path", llama, "--kv-compress", "csa2").resolved_dict()["device"] == "cpu"


def test_record_travels_to_children_before_and_after_resolution(llama):
    before = pickle.loads(pickle.dumps(parse("--model-path", llama, "--kv-compress", "csa2", *ALL_FLAGS)))
    after = pickle.loads(pickle.dumps(resolve("--model-path", llama, "--kv-compress", "csa2", *ALL_FLAGS)))
    assert options_from(before) == options_from(after) == CHANGED
    assert after.resolved_dict()["page_size"] == 64


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_page_sizes_to_choose_from(llama, page_size):
    record = resolve("--model-path", llama, "--kv-compress", "csa2", "--page-size", str(page_size))
    assert record.resolved_dict()["page_size"] == page_size


def test_other_page_sizes_are_refused_with_the_choice(llama):
    with pytest.raises(OptionError, match=r"--page-size 16 cannot .* sets --page-size 64.*, or give 32 or 128"):
        resolve("--model-path", llama, "--kv-compress", "csa2", "--page-size", "16")


def test_server_info_shows_the_options(llama):
    values = resolve("--model-path", llama, "--kv-compress", "csa2", *ALL_FLAGS).resolved_dict()
    assert {name: values[name] for name in ALL_OPTIONS} == ALL_OPTIONS
    assert values["kv_compress"] == "csa2"


def test_published_configuration(llama, published):
    assert not enabled_here()
    published(resolve("--model-path", llama, "--kv-compress", "csa2", *ALL_FLAGS))
    assert enabled_here()
    assert options_here() == CHANGED
    published(resolve("--model-path", llama))
    assert not enabled_here()


def test_namespace_holds_our_fields_only():
    ours = {name for name, namespace in Csa2ServerArgs._NS_BY_FIELD.items() if namespace == CONFIG_NAMESPACE}
    assert ours == {"kv_compress", *ALL_OPTIONS}


def test_incomplete_registration_is_reported_where_the_flag_is_used(llama, monkeypatch):
    broken = plugin._Registration()
    broken.failure = ImportError("no module named x")
    monkeypatch.setattr(plugin, "_registration", broken)
    with pytest.raises(IntegrityError, match=r"csa2 plugin is not registered completely .*no module named x"):
        resolve("--model-path", llama, "--kv-compress", "csa2")
    resolve("--model-path", llama)


def test_value_that_a_later_handler_replaced_is_reported(llama):
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sglang_csa2 import resolve as steps

    record = parse("--model-path", llama, "--kv-compress", "csa2")
    steps.early(record, lambda args: None)
    declare_resolution(record, "another plugin", page_size=1)
    with pytest.raises(IntegrityError, match="resolved --page-size to 1, but --kv-compress csa2 needs 64"):
        steps.late(record, lambda args: None)
