"""Two ranks of tensor parallelism: what one model says, and the same page table on both after every batch.

The ranks compare their page tables themselves (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER) and would end with an error.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from split_model import write_split_model
from transformers import AutoTokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("rank_program.py")
CAPITALS = {"Germany": "Berlin", "Italy": "Rome", "Japan": "Tokyo"}
"""What the demo model knows."""
ARENA_BYTES = 24 * 2**20
"""25 plain pages of a rank: 1600 tokens. The requests below hold 5000."""
STRICT = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return write_split_model(tmp_path_factory.mktemp("split") / "model", demo_model)


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


def asks(tokenizer):
    """(turn of the loop, prompt, tokens to answer): known answers, then a shared prefix and strangers, then hits, then one
    that the agreement guard can follow."""
    from pydoc_data.topics import topics

    text = tokenizer("\n\n".join(topics[name] for name in sorted(topics))[:40000])["input_ids"]
    start = "The capital of France is Paris. The capital of Greece is Athens. The capital of"
    known = [tokenizer(f"{start} {country} is")["input_ids"] for country in CAPITALS]
    sharing = [text[:300] + text[1000 * i : 1000 * i + 200] for i in (1, 2, 3)]
    strangers = [text[500 * i : 500 * i + 300] for i in range(9, 17)]
    turns = ((1, known, 8), (20, sharing, 20), (30, strangers, 20), (150, sharing, 20), (260, [text[9000:9140]], 40))
    return [(turn, prompt, length) for turn, prompts, length in turns for prompt in prompts]


@pytest.fixture(scope="module")
def two(model, tokenizer, tmp_path_factory):
    """What each of the two ranks says at the end."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        **{"tp_size": 2, "nccl_port": port, "chunked_prefill_size": 256},
        **{"csa2_arena_size": str(ARENA_BYTES), "csa2_ratio": "4", "csa2_warm_tokens": 128},
        # Pages leave the hot window at once: those of a reference, which are few in this arena, too.
        **{"csa2_guard": 1.0, "csa2_hot_tokens": 0},
    }
    processes, logs = [], [folder / f"log{rank}" for rank in range(2)]
    try:
        for rank, log in enumerate(logs):
            job = folder / f"job{rank}"
            output = str(folder / f"result{rank}")
            job.write_text(json.dumps({"rank": rank, "asks": asks(tokenizer), "options": options, "output": output}))
            with log.open("wb") as out:
                command = [sys.executable, str(PROGRAM), str(model), str(job)]
                environment = {**os.environ, **STRICT, **CORES}
                processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(TIMEOUT_S) == 0, log.read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"result{rank}").read_text()) for rank in range(2)]


def test_each_rank_holds_its_heads_at_the_same_price(two):
    assert [result["heads"] for result in two] == [2, 2]
    assert two[0]["page_bytes"] == two[1]["page_bytes"]
    assert two[0]["arena_bytes"] == two[1]["arena_bytes"] <= ARENA_BYTES


def test_ranks_have_the_same_page_table(two):
    assert [result["checked"] for result in two] == [True, True]
    assert two[0]["batches"] == two[1]["batches"] > 40
    assert two[0]["digests"] == two[1]["digests"]
    # All of it happened: pressure, every format, and nothing is lost.
    assert two[0]["demotions"] > 0
    assert two[0]["formats"] == ["bf16", "csa2-4x", "fp4", "fp8"]
    assert [result["faults"] for result in two] == [[], []]


def test_ranks_have_the_same_samples(two):
    assert two[0]["guard"] == two[1]["guard"]
    compared, agreed, skipped = two[0]["guard"]
    assert 0 < agreed <= compared
    assert skipped > 0


def test_they_say_what_the_model_says(two, tokenizer):
    for i, capital in enumerate(CAPITALS.values()):
        assert capital in tokenizer.decode(two[0]["texts"][f"1-{i}"])
