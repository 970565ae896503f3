"""Features of SGLang beside the compressed cache: grammars, log probabilities, hidden states, priorities, sessions, LoRA.

One server has them all switched on, and runs two requests at a time. After each test the bytes add up.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import write_adapter
from served import (
    ARENA,
    CERTAIN_PROMPTS,
    CERTAIN_TOKENS,
    PAGE_SIZE,
    Later,
    Served,
    StartServer,
    check_stats,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.e2e

SLOTS = 2
"""Requests that run at once; one more must preempt."""
URGENT = 100
"""A priority far enough above the default of 0, see --priority-scheduling-preemption-threshold."""
LONG = 330
"""Tokens of a prompt whose oldest pages leave the hot window: they are compressed when it is read again."""
LONG_HIT = (LONG - 1) // PAGE_SIZE * PAGE_SIZE
UNCOMPRESSED = 100
"""Tokens of a prompt that stays in the model dtype, with an answer."""
ADAPTERS = ("red", "blue")


@pytest.fixture(scope="module")
def running(start_server: StartServer, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [f"{name}={write_adapter(folder / name, demo_model, seed)}" for seed, name in enumerate(ADAPTERS)]
    return start_server(
        *ARENA,
        *("--max-running-requests", str(SLOTS), "--enable-priority-scheduling", "--enable-return-hidden-states"),
        # SGLang's LoRA kernels for a CPU. The head in fp32, so that the words of the log probabilities are not a bf16 step.
        *("--enable-fp32-lm-head", "--enable-lora", "--lora-backend", "torch_native", "--lora-paths", *adapters),
    )


@pytest.fixture
def server(running: Served) -> Iterator[Served]:
    """The server, idle and with an empty cache; afterwards its bytes add up and a flush frees all of them."""
    running.flush()
    yield running
    running.wait_idle()
    check_stats(running.stats())
    running.flush()
    stats = running.stats()
    assert (stats["used_bytes"], stats["logical_tokens"]) == (0, 0)
    assert running.faults() == []


def cached(answer: Any) -> int:
    tokens: int = answer["meta_info"]["cached_tokens"]
    return tokens


def test_overlap_scheduling_stays_on(server: Served) -> None:
    assert server.get("/server_info").json()["disable_overlap_schedule"] is False


# Grammars

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "continent": {"enum": ["Europe", "Asia", "Africa"]},
        "large": {"type": "boolean"},
    },
    "required": ["name", "continent", "large"],
}
GRAMMARS = {
    "json_schema": json.dumps(CITY),
    "regex": r"(red|green|blue)-[0-9]{3}-[A-F]{2}",
    "ebnf": 'root ::= "(" root ")" | "x" "y"',
}


def follows(kind: str, text: str) -> bool:
    """Whether `text` is a word of the grammar."""
    if kind == "regex":
        return re.fullmatch(GRAMMARS[kind], text) is not None
    if kind == "ebnf":
        depth = text.count("(")
        return text == "(" * depth + "xy" + ")" * depth
    city = json.loads(text)
    assert list(city) == CITY["required"]
    return re.fullmatch("[A-Z][a-z]{2,9}", city["name"]) is not None and isinstance(city["large"], bool)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_answers_follow_a_grammar(server: Served, text_ids: list[int], kind: str) -> None:
    sampling = {kind: GRAMMARS[kind], "ignore_eos": False}
    answers = [server.generate(text_ids[:LONG], 80, sampling) for _ in range(2)]
    assert [cached(answer) for answer in answers] == [0, LONG_HIT]
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert follows(kind, answer["text"]), answer["text"]


def test_json_mode_of_a_chat_beside_a_free_answer(server: Served) -> None:
    free = Later(lambda: server.generate(CERTAIN_PROMPTS[0], CERTAIN_TOKENS)["text"])
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = server.chat("Describe Rome as JSON.", max_tokens=80, response_format=schema)
    assert follows("json_schema", answer["choices"][0]["message"]["content"])
    server.flush()
    assert free.result() == server.generate(CERTAIN_PROMPTS[0], CERTAIN_TOKENS)["text"]


# Numbers of the model

Truth = Callable[[list[int]], tuple[Tensor, Tensor]]
"""(T, vocabulary) log probabilities of the next token and (T, hidden) last hidden states of T tokens."""


@pytest.fixture(scope="module")
def engines(demo_model: Path) -> dict[str, Truth]:
    """The model without any cache, in fp32, which is the truth, and in bf16, which says what rounding costs."""

    def engine(dtype: torch.dtype) -> Truth:
        model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=dtype).eval()

        def run(tokens: list[int]) -> tuple[Tensor, Tensor]:
            with torch.inference_mode():
                out = model(torch.tensor([tokens]), output_hidden_states=True)
            return out.logits[0].float().log_softmax(-1), out.hidden_states[-1][0].float()

        return run

    return {"fp32": engine(torch.float32), "bf16": engine(torch.bfloat16)}


def rms(error: Tensor) -> float:
    return math.sqrt(float(error.square().mean()))


ROUNDING = 1.5
"""Error of the server over the error of an engine without a cache that computes in the same bf16, both root mean squares.

Both round at each of some 300 operations, in different orders; a cache that loses anything adds to it.
"""


def test_logprobs_of_prompt_and_answer(server: Served, text_ids: list[int], engines: dict[str, Truth]) -> None:
    prompt = text_ids[700 : 700 + UNCOMPRESSED]
    answer = server.generate(prompt, 12, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    meta = answer["meta_info"]
    rows = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    tokens = torch.tensor([token for _, token, _ in rows])
    assert tokens.tolist() == [*prompt[1:], *answer["output_ids"]]
    served = torch.tensor([logprob for logprob, _, _ in rows])
    right, bf16 = (
        engines[name](prompt + answer["output_ids"])[0][:-1].gather(-1, tokens[:, None])[:, 0] for name in ("fp32", "bf16")
    )
    assert rms(served - right) < ROUNDING * rms(bf16 - right)
    for (logprob, token, _), best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert (logprob, token) == tuple(best[0][:2])
    assert server.stats()["pages"]["bf16"] == sum(server.stats()["pages"].values())


def test_hidden_states(server: Served, text_ids: list[int], engines: dict[str, Truth]) -> None:
    prompt = text_ids[700 : 700 + UNCOMPRESSED]
    answer = server.generate(prompt, 4, return_hidden_states=True)
    first, *later = answer["meta_info"]["hidden_states"]
    served = torch.tensor([*first, *later])
    right, bf16 = (engines[name](prompt + answer["output_ids"][:-1])[1] for name in ("fp32", "bf16"))
    assert served.shape == right.shape
    assert rms(served - right) < ROUNDING * rms(bf16 - right)


# Priorities


def test_an_urgent_request_preempts(server: Served, text_ids: list[int]) -> None:
    calls = [Later(lambda i=i: server.generate(text_ids[i * 500 : i * 500 + LONG], 120, priority=0)) for i in range(SLOTS)]
    server.wait_running(SLOTS)
    urgent = server.generate(text_ids[2000 : 2000 + LONG], 4, priority=URGENT)
    assert urgent["meta_info"]["completion_tokens"] == 4
    assert not all(call.done() for call in calls)
    answers = [call.result() for call in calls]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [120] * SLOTS
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) == 1
    server.wait_idle()
    # Each leaves its whole pages, and nothing of the time when it was preempted.
    whole = [(LONG + 119) // PAGE_SIZE] * SLOTS + [(LONG + 3) // PAGE_SIZE]
    assert server.stats()["logical_tokens"] == sum(whole) * PAGE_SIZE


def test_preempted_answers_are_those_of_requests_alone(server: Served, text_ids: list[int]) -> None:
    alone = [server.generate(prompt, CERTAIN_TOKENS)["text"] for prompt in CERTAIN_PROMPTS]
    server.flush()
    calls = [Later(lambda p=prompt: server.generate(p, CERTAIN_TOKENS, priority=0)) for prompt in CERTAIN_PROMPTS]
    server.wait_running(SLOTS)
    server.generate(text_ids[:LONG], 4, priority=URGENT)
    assert [call.result()["text"] for call in calls] == alone


# Sessions


def open_session(server: Served, **more: Any) -> str:
    answer = server.post("/open_session", capacity_of_str_len=4000, **more)
    assert answer.ok, answer.text
    identifier: str = answer.json()
    return identifier


def turn(server: Served, session: str, tokens: list[int], parent: Any = None, **more: Any) -> Any:
    rid = None if parent is None else parent["meta_info"]["id"]
    return server.generate(tokens, 20, session_params={"id": session, "rid": rid, **more})


def test_session_of_three_turns_and_a_branch(server: Served, text_ids: list[int]) -> None:
    session = open_session(server)
    first = turn(server, session, text_ids[:LONG])
    second = turn(server, session, text_ids[1000:1100], first)
    third = turn(server, session, text_ids[2000:2040], second)
    history = LONG + 20
    assert second["meta_info"]["prompt_tokens"] == history + 100
    assert third["meta_info"]["prompt_tokens"] == history + 100 + 20 + 40
    assert cached(second) == (history - 1) // PAGE_SIZE * PAGE_SIZE
    assert cached(third) == (history + 119) // PAGE_SIZE * PAGE_SIZE
    branch = turn(server, session, text_ids[3000:3050], first)
    assert branch["meta_info"]["prompt_tokens"] == history + 50
    assert cached(branch) == (history - 1) // PAGE_SIZE * PAGE_SIZE
    server.wait_idle()
    kept = server.stats()["logical_tokens"]
    assert server.post("/close_session", session_id=session).ok
    server.wait_idle()
    # Pages of a closed session stay as those of other requests do: in the prefix cache.
    assert server.stats()["logical_tokens"] == kept
    assert cached(server.generate(text_ids[:LONG])) == LONG_HIT


def test_session_says_what_the_whole_text_says(server: Served, text_ids: list[int]) -> None:
    # The 12 tokens after these 130 lead the next best by more than rounding, see CERTAIN_AT in test_answers.
    session = open_session(server)
    first = turn(server, session, text_ids[500:564])
    second = turn(server, session, text_ids[564:630], first, drop_previous_output=True)
    assert second["meta_info"]["prompt_tokens"] == 130
    server.post("/close_session", session_id=session)
    server.flush()
    assert server.generate(text_ids[500:630], 12)["output_ids"] == second["output_ids"][:12]


def test_request_of_an_unknown_session_is_refused(server: Served, text_ids: list[int]) -> None:
    answer = server.post("/generate", **server.body(text_ids[:10], 4, None, session_params={"id": "nobody"}))
    assert answer.status_code == 400
    assert "nobody" in answer.text


# LoRA


def test_adapters_share_no_pages(server: Served, text_ids: list[int]) -> None:
    prompt = text_ids[:LONG]
    names = (None, *ADAPTERS)
    answers = [server.generate(prompt, 16, lora_path=name) for name in names]
    assert [cached(answer) for answer in answers] == [0, 0, 0]
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    server.wait_idle()
    assert server.stats()["logical_tokens"] == 3 * ((LONG + 15) // PAGE_SIZE * PAGE_SIZE)
    again = [server.generate(prompt, 16, lora_path=name) for name in names]
    assert [cached(answer) for answer in again] == [LONG_HIT] * 3
    server.wait_idle()
    assert server.stats()["logical_tokens"] == 3 * ((LONG + 15) // PAGE_SIZE * PAGE_SIZE)


def test_adapters_in_one_batch(server: Served) -> None:
    names = [None, *ADAPTERS] * 2
    alone = {name: server.generate(CERTAIN_PROMPTS[0], 8, lora_path=name)["text"] for name in names}
    server.flush()
    together = server.generate([CERTAIN_PROMPTS[0]] * len(names), 8, lora_path=names)
    assert [answer["text"] for answer in together] == [alone[name] for name in names]
