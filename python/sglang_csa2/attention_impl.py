"""The implementation of attention that `--csa2-impl` chooses, for SGLang's pool."""

import logging

from csa2 import attention
from csa2.errors import UnsupportedModelError
from csa2.impl import resolve_impl
from sglang_csa2 import cpu_ops
from sglang_csa2.pool import Csa2KVPool

logger = logging.getLogger(__name__)


def make_attention(pool: Csa2KVPool, query_heads: frozenset[int]) -> attention.Attention:
    """The implementation that the options ask for; `pool` writes new tokens with it from then on.

    Args:
        query_heads: of the attention layers.

    Raises:
        UnsupportedModelError: layers differ in their query heads, and kernels are launched for one number.
    """
    from sglang_csa2.args import options_here

    options = options_here()
    implementation = resolve_impl(options.impl, options.rope)
    logger.info("csa2 attention: %s (%s)", implementation.name, implementation.detail)
    if implementation.name == "cuda" and len(query_heads) > 1:
        raise UnsupportedModelError(
            f"--csa2-impl cuda does not support this model: its layers have {sorted(query_heads)} query heads, and the "
            f"kernels take one number for all. Serve it without --kv-compress"
        )
    made = attention.make_attention(pool.store, implementation.name, max(query_heads))
    pool.write_with(made.write)
    if implementation.name == "cpu":
        cpu_ops.install()
    return made
