"""Prompts prefilled in chunks, mixed with decodes, over pages that are sealed between two chunks.

The truth is the model itself, in fp32 and in one piece; how answers are held against it: `judging.py`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import JUDGED, judged, other_context, rms, served_logprobs
from served import (
    ARENA,
    CAPITALS,
    CERTAIN_PROMPTS,
    CERTAIN_TOKENS,
    PAGE_SIZE,
    Later,
    Served,
    StartServer,
    capital_prompt,
    check_stats,
    poll,
)
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.e2e

CHUNK = 128
LENGTHS = (127, 128, 129, 191, 192, 193, 255, 256, 257, 400)
SIGNAL_SHARE = 0.15
"""Error over signal, both as root mean squares. Measured on these prompts: 0.013 to 0.072."""
Truth = Callable[[list[int]], list[float]]


@pytest.fixture(scope="module")
def running(start_server: StartServer) -> Served:
    return start_server(*ARENA, "--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk")


@pytest.fixture
def server(running: Served) -> Served:
    """The server, idle and with an empty cache."""
    running.flush()
    return running


@pytest.fixture(scope="module")
def truth(demo_model: Path) -> Truth:
    """Log probabilities of the last `JUDGED` tokens of a prompt by the model in fp32."""
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()

    def logprobs(prompt: list[int]) -> list[float]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            predicted = model(ids).logits[0, -JUDGED - 1 : -1].log_softmax(-1)
        values: list[float] = predicted.gather(-1, ids[0, -JUDGED:, None])[:, 0].tolist()
        return values

    return logprobs


def share_of_signal(answer: Any, prompt: list[int], text_ids: list[int], truth: Truth) -> float:
    right = truth(prompt)
    return rms(served_logprobs(answer), right) / rms(truth(other_context(prompt, text_ids)), right)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_compute_what_one_piece_does(server: Served, text_ids: list[int], truth: Truth, length: int) -> None:
    prompt = text_ids[700 : 700 + length]
    answer = judged(server, prompt)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert share_of_signal(answer, prompt, text_ids, truth) < SIGNAL_SHARE


def test_chunks_after_a_hit(server: Served, text_ids: list[int], truth: Truth) -> None:
    prompt = text_ids[700:1100]
    server.generate(prompt[:200])
    again = judged(server, prompt)
    assert again["meta_info"]["cached_tokens"] == 200 // PAGE_SIZE * PAGE_SIZE
    assert share_of_signal(again, prompt, text_ids, truth) < SIGNAL_SHARE


def test_known_answers(server: Served) -> None:
    answers = server.generate([capital_prompt(country) for country in CAPITALS])
    for answer, capital in zip(answers, CAPITALS.values(), strict=True):
        assert capital in answer["text"]


def test_chunks_beside_decodes(server: Served, text_ids: list[int], truth: Truth) -> None:
    alone = [server.generate(prompt, CERTAIN_TOKENS)["output_ids"] for prompt in CERTAIN_PROMPTS]
    seen = len(server.log_text())
    decoding = [Later(lambda p=prompt: server.generate(p, 100)) for prompt in CERTAIN_PROMPTS]
    server.wait_running(2)
    prompts = [text_ids[start : start + length] for start, length in ((2000, 193), (3000, 256), (4000, 400))]
    answers = [Later(lambda p=prompt: judged(server, p)) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert share_of_signal(answer.result(), prompt, text_ids, truth) < SIGNAL_SHARE
    assert [later.result()["output_ids"][:CERTAIN_TOKENS] for later in decoding] == alone
    batches = re.findall(r"Prefill batch.*#new-token: (\d+),.*#running-req: (\d+)", server.log_text()[seen:])
    assert any(int(new) >= CHUNK - 2 and int(running) >= 2 for new, running in batches), batches


def test_abort_between_chunks(server: Served, text_ids: list[int]) -> None:
    prompt = text_ids[:3000]
    answer = Later(lambda: server.generate(prompt, rid="abort-chunked"))
    poll("two chunks computed", lambda: server.stats()["logical_tokens"] >= 2 * CHUNK, 60)
    server.abort("abort-chunked")
    meta = answer.result()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    server.wait_idle()
    stats = server.stats()
    check_stats(stats)
    assert stats["logical_tokens"] < len(prompt)
    assert "Berlin" in server.generate(capital_prompt("Germany"))["text"]
    # What was computed before the abort may be found again.
    again = server.generate(prompt)
    assert again["meta_info"]["cached_tokens"] % PAGE_SIZE == 0
    assert again["meta_info"]["cached_tokens"] <= stats["logical_tokens"]
    assert again["meta_info"]["completion_tokens"] == 12
