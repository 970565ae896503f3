"""The implementation of attention that `--csa2-impl` chooses, for SGLang's pool."""

import logging

from csa2 import attention
from csa2.impl import resolve_impl
from sglang_csa2 import cpu_ops
from sglang_csa2.pool import Csa2KVPool

logger = logging.getLogger(__name__)


def make_attention(pool: Csa2KVPool) -> attention.Attention:
    """The implementation that the options ask for; `pool` writes new tokens with it from then on."""
    from sglang_csa2.args import options_here

    options = options_here()
    implementation = resolve_impl(options.impl, options.rope)
    logger.info("csa2 attention: %s (%s)", implementation.name, implementation.detail)
    made = attention.make_attention(pool.store, implementation.name)
    pool.write_with(made.write)
    if implementation.name != "reference":
        cpu_ops.install()
    return made
