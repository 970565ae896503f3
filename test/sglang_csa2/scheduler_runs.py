"""Runs of a real scheduler, from the side of the tests: what to ask, what came of it.

One process imports SGLang and forks for every run, so that a run takes seconds: the program `lone_scheduler.py`.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("lone_scheduler.py")
PAGE = 64
PLAIN_PAGE_BYTES = 2 * PAGE * 64 * 2
"""Keys and values of the model below: one layer, one head of 64 channels, bf16."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}


@dataclass(frozen=True)
class Ask:
    """One request."""

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool = True
    after: tuple[str, int] | None = None
    """Sent when this other request has so many tokens, or this command is answered."""
    extra_key: str | None = None
    custom_params: dict[str, Any] | None = None
    abort_after: int | None = None
    """Aborted when it has so many tokens; 0 at once."""
    continues: str | None = None
    """Sent when this other request has ended; its prompt and its answer come before `prompt`."""


@dataclass(frozen=True)
class Command:
    """One control operation, or "flush", "new weights", "abort all", "corrupt", "flush now".

    "corrupt" gives compressed pages each other's bytes. "flush now" does not wait until the scheduler is idle.
    """

    name: str
    op: str
    payload: dict[str, Any] = field(default_factory=dict)
    after: tuple[str, int] | None = None
    """Sent when this request has so many tokens, or this command is answered; a document is when it is encoded."""
    turns: int = 0
    """Turns of the loop that it waits beyond that."""


@dataclass(frozen=True)
class Ending:
    """How a request ended: "length", "stop" or "abort"."""

    kind: str
    status: int | None
    message: str
    tokens: int
    cached_tokens: int


@dataclass
class Result:
    """What a run gave."""

    endings: dict[str, Ending] = field(default_factory=dict)
    replies: dict[str, Any] = field(default_factory=dict)
    """(status, data) of each command by its name."""
    stuck: list[str] = field(default_factory=list)
    max_prompt_tokens: int = 0
    """Prompts of so many tokens and more are refused."""
    stats: dict[str, Any] = field(default_factory=dict)
    """At the end, before a flush."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of each answer."""
    hits: int = 0
    """Sum over all pages at the end."""
    mapped_total: int = 0
    """Pages mapped since the start, as their age is counted."""
    tree_tokens: int = 0
    most_running: int = 0
    retracted: int = 0
    replays: int = 0
    """Decode steps that a graph computed."""
    checked: int = 0
    """Forward passes before which the pages of a request were compared with what the model writes."""


def words(seed: int, count: int) -> tuple[int, ...]:
    """Token ids that stand for text."""
    chance = random.Random(seed)
    return tuple(chance.randrange(3, 500) for _ in range(count))


class SchedulerForks:
    """The process that forks."""

    def __init__(self, folder: Path, *, interpret: bool = False) -> None:
        """Start it; `interpret` lets Triton's interpreter run the kernels for CUDA."""
        self._log = folder / "log"
        self._folder = folder
        (folder / "config.json").write_text(json.dumps(MODEL))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    "TRITON_INTERPRET": str(int(interpret)),
                },
                text=True,
            )

    def run(
        self,
        asks: Sequence[Ask],
        plain_pages: int,
        in_flight: int = 1000,
        new_token_ratio: float = 0.7,
        commands: Sequence[Command] = (),
        stock: bool = False,
        attention: float | None = None,
        window: int | None = None,
        on_device: bool = False,
        captured: bool = False,
        **options: Any,
    ) -> Result:
        """Serve `asks`, at most `in_flight` at a time, in an arena of so many plain pages.

        Args:
            new_token_ratio: share of a request's tokens to come that SGLang expects at first; small makes it retract.
            commands: what to do meanwhile.
            attention: weights of the output of attention; left out, what it adds decides nothing.
            window: samples of the agreement guard in one judgement.
            captured: attention of decode steps is captured and replayed, as in a CUDA graph.
            on_device: the cache lies on the pretended device, which needs the implementation "cuda".
            stock: SGLang's own cache with pages of the same size, in the same bytes.
            options: further fields of `ServerArgs`.
        """
        if stock:
            size: dict[str, Any] = {"max_total_tokens": plain_pages * PAGE, "page_size": PAGE}
        else:
            size = {"kv_compress": "csa2", "csa2_arena_size": plain_pages * PLAIN_PAGE_BYTES}
            size["csa2_pack_weights"] = "none"  # the page check writes weights of its own
        options = {**size, "chunked_prefill_size": 256, **options}
        env = {**STRICT, "SGLANG_INIT_NEW_TOKEN_RATIO": str(new_token_ratio)}
        job = {"asks": [asdict(ask) for ask in asks], "in_flight": in_flight, "options": options, "env": env}
        job |= {"attention": attention, "window": window, "on_device": on_device, "captured": captured}
        job["commands"] = [asdict(command) for command in commands]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or "null")
        assert isinstance(answer, dict), f"the scheduler failed: {answer}; its log ends:\n{self._log.read_text()[-6000:]}"
        answer["endings"] = {rid: Ending(**ending) for rid, ending in answer["endings"].items()}
        return Result(**answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
