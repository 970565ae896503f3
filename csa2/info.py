"""What a bug report needs: versions, machine, options, and what a running server reports. Imports no SGLang."""

import http
import http.client
import importlib.metadata
import os
import platform
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from csa2.errors import Csa2Error, OptionError
from csa2.impl import resolve_impl
from csa2.options import CacheOptions
from csa2.stats import CacheStats
from csa2.units import format_bytes

PACKAGES = ("sglang-csa2", "sglang", "torch", "transformers", "apache-tvm-ffi")
ISA_FLAGS = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_bf16": "avx512_bf16",
    "avx512_vnni": "avx512_vnni",
    "amx": "amx_tile",
}
"""What is reported, and the flag of /proc/cpuinfo that tells it."""

DEFAULT_URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "CSA2_API_KEY"
"""Environment variable with the key of a server that was started with --api-key."""
STATS_PATH = "/csa2/stats"
TIMEOUT_SECONDS = 10.0
Report = dict[str, Any]


class ServerStatsError(Csa2Error, RuntimeError):
    """A server that does not report the statistics of the compressed cache."""


def collect(url: str | None = None) -> Report:
    """The report: `versions`, `platform`, `options`, and `server` when `url` is given.

    Raises:
        OptionError: `url` is not an http address.
        ServerStatsError: the server does not answer, or not with statistics.
    """
    # First, so that a wrong address fails before torch is imported.
    server = None if url is None else msgspec.to_builtins(fetch_stats(url))
    options = CacheOptions()
    implementation = resolve_impl(options.impl)
    report: Report = {
        "versions": versions(),
        "platform": machine(),
        "options": {
            **msgspec.structs.asdict(options),
            "resolved_impl": implementation.name,
            "resolved_impl_detail": implementation.detail,
        },
    }
    if server is not None:
        report["server"] = {"url": url, **server}
    return report


def versions() -> dict[str, str]:
    """Versions of Python, the system and the packages that matter, from package metadata alone."""
    found = {"python": platform.python_version(), "os": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> Report:
    """CPU, memory and CUDA devices of this machine."""
    cpuinfo = _read("/proc/cpuinfo")
    flags = set(_field(cpuinfo, "flags").split())
    return {
        "cpu": _field(cpuinfo, "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "isa": {name: flag in flags for name, flag in ISA_FLAGS.items()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "available_bytes": _available_bytes(),
        "cuda": _cuda_devices(),
    }


def fetch_stats(url: str, timeout: float = TIMEOUT_SECONDS) -> CacheStats:
    """GET `url`/csa2/stats.

    Raises:
        OptionError: `url` is not an http address.
        ServerStatsError: no answer, no such route, or an answer of another shape.
    """
    address = url.rstrip("/") + STATS_PATH
    status, body = fetch(url, STATS_PATH, timeout)
    if status != http.HTTPStatus.OK:
        raise ServerStatsError(_explain_status(url, status))
    try:
        return msgspec.json.decode(body, type=CacheStats)
    except msgspec.MsgspecError as error:
        raise ServerStatsError(
            f"{address} answers with something that is not the statistics of this version ({error}): use the `csa2` "
            f"command of the environment that runs the server"
        ) from error


def fetch(url: str, path: str, timeout: float = TIMEOUT_SECONDS) -> tuple[int, bytes]:
    """HTTP status and body of GET `url` + `path`, asked with the key of `CSA2_API_KEY`.

    Raises:
        OptionError: `url` is not an http address.
        ServerStatsError: no answer.
    """
    host = _host(url)
    request = urllib.request.Request(url.rstrip("/") + path)  # noqa: S310 - _host lets http and https pass, nothing else
    if key := os.environ.get(KEY_VARIABLE):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with _opener(host).open(request, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, http.client.HTTPException) as error:
        # URLError and time-outs are both OSError.
        reason = getattr(error, "reason", None) or error
        raise ServerStatsError(
            f"no server answers at {url} ({reason}): check the address, and that the server has finished starting"
        ) from error


def _host(url: str) -> str:
    """The host named by `url`."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") else None
        _ = parts.port
    except ValueError:
        # A port that is no number, or half an IPv6 address.
        host = None
    if not host:
        raise OptionError(f"--url {url!r} is not an address: write it like {DEFAULT_URL}")
    return host


def render(report: Report) -> str:
    """The report as text, one fact a line."""
    lines = _section("versions", report["versions"])
    lines += _section("machine", _machine_lines(report["platform"]))
    lines += _section("options (defaults)", report["options"])
    if "server" in report:
        lines += _section("server", _server_lines(report["server"]))
        lines += _section("server options", report["server"]["options"])
    return "\n".join(lines)


def _machine_lines(hardware: Report) -> dict[str, object]:
    isa = [name for name, there in hardware["isa"].items() if there]
    total, available = format_bytes(hardware["memory_bytes"]), format_bytes(hardware["available_bytes"])
    return {
        "cpu": hardware["cpu"],
        "cores": f"{hardware['cores']} ({hardware['usable_cores']} usable by this process)",
        "instruction sets": ", ".join(isa) or "none of " + ", ".join(ISA_FLAGS),
        "memory": f"{total}, {available} available",
        "cuda": "; ".join(hardware["cuda"]) or "no device",
    }


def _server_lines(server: Report) -> dict[str, object]:
    pages = {name: f"{count}, {server['page_bytes'].get(name, '?')} bytes each" for name, count in server["pages"].items()}
    used, arena = format_bytes(server["used_bytes"]), format_bytes(server["arena_bytes"])
    return {
        "url": server["url"],
        "arena": f"{used} used of {arena}, {format_bytes(server['slab_bytes'])} in slabs",
        "tokens": f"{server['logical_tokens']} in use, capacity {server['capacity_tokens']}",
        **({"replicas": len(server["replicas"])} if server["replicas"] else {}),
        "compression ratio": f"{server['compression_ratio']:.2f} against bf16",
        "metadata": f"{100 * server['metadata_fraction']:.1f} % of the bytes used",
        **{f"pages {name}": text for name, text in pages.items()},
        **{f"demotions {step}": count for step, count in server["demotions_total"].items()},
        "compactions": server["compactions_total"],
        "evicted tokens": server["evicted_tokens_total"],
        "documents": f"{server['documents']} with {server['pinned_pages']} pages, {format_bytes(server['pinned_bytes'])}",
        "prefix hits": (
            f"{server['prefix_hit_tokens_total']} of {server['prompt_tokens_total']} prompt tokens in "
            f"{server['turns_total']} turns"
        ),
        "agreement guard": (
            f"{server['guard_agreed_total']} of {server['guard_compared_total']} samples agree"
            if server["guard_compared_total"]
            else "no samples"
        ),
        "identity basis layers": ", ".join(map(str, server["identity_basis_layers"])) or "none",
    }


def _section(title: str, facts: dict[str, Any]) -> list[str]:
    width = max((len(name) for name in facts), default=0)
    return [f"{title}:", *(f"  {name:<{width}}  {value}" for name, value in facts.items())]


def _explain_status(url: str, code: int) -> str:
    if code == 404:
        return (
            f"the server at {url} has no /csa2/stats: it was started without --kv-compress csa2. Start it with that option"
        )
    if code in (401, 403):
        return f"the server at {url} wants its API key (HTTP {code}): set {KEY_VARIABLE} to it and ask again"
    return f"the server at {url} answers /csa2/stats with HTTP {code}: look at its log"


def _opener(host: str) -> urllib.request.OpenerDirector:
    """Proxies of the environment are for other machines, not for a server on this one."""
    if host == "localhost" or host == "::1" or host.startswith("127."):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _available_bytes() -> int:
    """Memory a new process could take, in bytes; 0 where the system does not say."""
    words = _field(_read("/proc/meminfo"), "MemAvailable").split()
    return int(words[0]) * 1024 if words else 0


def _cuda_devices() -> list[str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [f"unknown, torch cannot be imported: {error}"]
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [f"{p.name}, {format_bytes(p.total_memory)}, sm_{p.major}{p.minor}" for p in properties]


def _read(path: str) -> str:
    """The text of a file of /proc, empty where the system has none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _field(text: str, name: str) -> str:
    """The value of the first `name : value` line, or an empty string."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""
