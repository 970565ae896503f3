"""What the models of this folder serve: prompts of several pages, shared prefixes, a conversation, batches."""

import torch
from jobs import Request, Run
from tiny_models import VOCABULARY
from torch import Tensor

from csa2.options import PAGE_SIZE

HOT_TOKENS = 64
BEYOND_CODEC = 0.03
"""Error of sealed pages beside that of the codec, in fp32: see `test_model_families`, which estimates one hundredth. A few,
because the codes that are carried over are few."""
FP32_ROUNDING = 1e-5
"""Of log probabilities after three layers, for runs without a bf16 run to derive it from. Measured: 2e-6."""


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


LONG = tokens(1, 376)
"""Six pages, the last nearly full, prefilled in three chunks; some decode steps later a page leaves the window."""
SHARED = LONG[: 5 * PAGE_SIZE]
TAIL = tokens(2, 40)
CHAT = tokens(3, 7 * PAGE_SIZE)
ANSWER = tokens(4, 12)
FP4_REQUESTS = ("long", "again", "beside")
FP8_REQUESTS = ("turn3", "turn4", "mixed")
GROUPS = (
    (Request("long", LONG, tokens(5, 24)),),
    (Request("again", SHARED + TAIL, ANSWER),),
    # A conversation: each turn finds the pages of the turns before, which leave the hot window while it runs.
    *((Request(f"turn{i}", CHAT[: 160 + PAGE_SIZE * i], ANSWER[:4]),) for i in range(5)),
    # Two requests at a time, over different formats.
    (Request("beside", SHARED + TAIL[::-1], ANSWER), Request("mixed", CHAT[:400] + TAIL, ANSWER)),
)
CONTROLS = (
    # The same requests after other tokens: how much the sealed pages matter.
    (Request("not again", tokens(6, len(SHARED)) + TAIL, ANSWER),),
    (Request("not mixed", tokens(7, 400) + TAIL, ANSWER),),
)


def difference(run: Run, other: Run, *rids: str) -> Tensor:
    """Of the named requests, or of all."""
    chosen = rids or [request.rid for group in GROUPS for request in group]
    return torch.cat([(run.logprobs[rid] - other.logprobs[rid]).flatten() for rid in chosen])


def error(run: Run, other: Run, *rids: str) -> float:
    return difference(run, other, *rids).pow(2).mean().sqrt().item()
