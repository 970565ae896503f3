"""What the cache is built from: the share of a process in a CPU's memory, and the dtype of its pages."""

import pytest
import torch
from sglang.srt.utils import common

from csa2.errors import OptionError
from sglang_csa2.memory import _arena_bytes, check_cache_dtype
from sglang_csa2.splitting import ranks_of_a_node


@pytest.mark.parametrize(("ranks", "nodes", "share"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 2), (1, 2, 1)])
def test_ranks_share_a_node(monkeypatch: pytest.MonkeyPatch, ranks: int, nodes: int, share: int) -> None:
    monkeypatch.setattr(common, "get_cpu_ids_by_node", lambda: ["0"] * nodes)
    assert ranks_of_a_node(ranks) == share


def test_each_process_takes_its_share() -> None:
    assert _arena_bytes(None, 1000, 2) == 500
    assert _arena_bytes(500, 1000, 2) == 500


def test_more_than_a_share_is_refused_with_the_numbers() -> None:
    with pytest.raises(OptionError, match=r"of 600 bytes .* 1000 B are left .*, a share of 500 B for each of 2 processes"):
        _arena_bytes(600, 1000, 2)
    with pytest.raises(OptionError, match=r"after the weights\. Give"):
        _arena_bytes(1001, 1000, 1)


def test_a_checkpoint_that_asks_for_a_quantised_cache_is_refused_with_the_option() -> None:
    """SGLang follows the checkpoint where --kv-cache-dtype is "auto", and names only the result, a dtype."""
    with pytest.raises(OptionError, match=r"asks for a KV cache of float8_e4m3fn: give --kv-cache-dtype bfloat16"):
        check_cache_dtype(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_cache_dtype(dtype)
