"""What `--tp-size` and `--dp-size` ask of the model and of the machine."""

import os
from typing import Any

from csa2.errors import OptionError

BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's environment variable: the cores of each rank, separated by |."""


def check_heads(config: Any, model_config: Any) -> None:
    """Refuse to split a model whose heads do not divide over the ranks.

    UPSTREAM(sglang 0.5.23: pads such models on every CPU, but pads their weights with its own CPU engine only).

    Raises:
        OptionError: names both numbers.
    """
    ranks = config.tp_size
    query_heads, kv_heads = model_config.num_attention_heads, model_config.get_total_num_kv_heads()
    if query_heads % ranks or kv_heads % ranks:
        raise OptionError(
            f"--tp-size {ranks} cannot split this model: it has {query_heads} query and {kv_heads} KV heads, and each rank "
            f"needs the same number. Give a --tp-size that divides both"
        )


def ranks_of_a_node(num_ranks: int) -> int:
    """How many of `num_ranks` processes of a server on a CPU share one NUMA node, and with it its memory."""
    from sglang.srt.utils.common import get_cpu_ids_by_node

    return -(-num_ranks // len(get_cpu_ids_by_node()))


def check_cores(config: Any) -> None:
    """Refuse more ranks than the machine has NUMA nodes, unless the user says which cores are whose.

    SGLang stops for the same reason, but in every rank and after the others have begun to wait for it.

    Raises:
        OptionError: with a value for the environment variable.
    """
    ranks = config.tp_size * config.dp_size
    if ranks == 1 or os.environ.get(BINDING, "all") != "all":
        return
    from sglang.srt.utils.common import get_cpu_ids_by_node

    nodes = len(get_cpu_ids_by_node())
    if ranks > nodes:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // ranks)
        parts = [cores[i * share % len(cores) :][:share] for i in range(ranks)]
        raise OptionError(
            f"--tp-size {config.tp_size} with --dp-size {config.dp_size} starts {ranks} processes on a machine with {nodes} "
            f"NUMA nodes: say which cores each may use, for example "
            f"{BINDING}='{'|'.join(','.join(map(str, part)) for part in parts)}'"
        )
