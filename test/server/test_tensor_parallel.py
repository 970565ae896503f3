"""A server on two ranks: the texts of one, and the same page table on both after every batch.

The ranks compare their page tables themselves (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER); where they differ the server ends.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from served import CAPITALS, PAGE_SIZE, Later, Served, StartServer, capital_prompt, check_stats
from split_model import write_split_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.e2e

ARENA_BYTES = 24 * 2**20
"""Each rank: 17 plain pages of 1.4 MB, 1088 tokens in bf16."""
PAGE_BYTES = 30 * 2 * 2 * PAGE_SIZE * 64 * 2
"""A plain page of one rank: 30 layers, keys and values of 2 heads of 64 channels."""
RANKS = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


@pytest.fixture(scope="module")
def split_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_split_model(tmp_path_factory.mktemp("split") / "model", demo_model)


@pytest.fixture(scope="module")
def running(start_server: StartServer, split_model: Path) -> Served:
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    options = ("--tp-size", "2", "--csa2-arena-size", str(ARENA_BYTES), "--csa2-ratio", "4", "--csa2-warm-tokens", "128")
    return start_server(*options, model=split_model, **RANKS, **cores)


@pytest.fixture
def server(running: Served) -> Served:
    """The server, idle and with an empty cache."""
    running.flush()
    return running


def test_each_rank_holds_its_heads(server: Served) -> None:
    stats = server.stats()
    assert stats["page_bytes"]["bf16"] == PAGE_BYTES
    assert server.log_text().count("csa2: no --csa2-calibration") == 2


def test_known_answers(server: Served) -> None:
    answers = server.generate([capital_prompt(country) for country in CAPITALS])
    for answer, capital in zip(answers, CAPITALS.values(), strict=True):
        assert capital in answer["text"]


def test_two_ranks_say_what_the_model_says(server: Served, demo_model: Path, text_ids: list[int]) -> None:
    """Log probabilities of a prompt on plain pages, against the model in fp32; bf16 on one rank says what rounding costs."""
    prompt = text_ids[700:800]
    answer = server.generate(prompt, 1, return_logprob=True, logprob_start_len=0)
    served = torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][1:]])

    def alone(dtype: torch.dtype) -> torch.Tensor:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logits = AutoModelForCausalLM.from_pretrained(demo_model, dtype=dtype).eval()(ids).logits
        return logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]

    right = alone(torch.float32)
    # Sums over ranks round in another order, and the logits are bf16 on both sides.
    assert (served - right).square().mean() < (1.5 * (alone(torch.bfloat16) - right)).square().mean()


def test_pages_of_all_formats_under_pressure(server: Served, text_ids: list[int]) -> None:
    """Requests that share a prefix, others that do not, aborts, hits: four times what fits plain."""
    prompts = [text_ids[:300] + text_ids[1000 * i : 1000 * i + 200] for i in range(1, 4)]
    prompts += [text_ids[500 * i : 500 * i + 400] for i in range(9, 13)]
    doomed = Later(lambda: server.generate(text_ids[:600], 2000, rid="doomed"))
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers: list[Any] = list(clients.map(lambda prompt: server.generate(prompt, 20), prompts))
    server.abort("doomed")
    doomed.result()
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [20] * len(prompts)
    assert sum(server.stats()["demotions_total"].values()) > 0
    again = [server.generate(prompt, 20) for prompt in prompts[:3]]
    assert all(answer["meta_info"]["cached_tokens"] >= 256 for answer in again)
    server.wait_idle()
    check_stats(server.stats())
    assert server.faults() == []
