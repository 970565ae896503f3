"""`sgl.Engine(csa2_documents=...)`: encode the documents of a folder before the constructor returns.

UPSTREAM(sglang 0.5.23: `Engine.__init__` takes its event loop last, by `self._ensure_event_loop()`, when everything else is
there; the HTTP server never does. It is replaced by hand: hooks of a static method do not see the engine.)
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from csa2.errors import OptionError
from sglang_csa2.document_pinning import load_folder


def install() -> None:
    """Let engines that are made after this call, or being made, load their documents. Idempotent."""
    from sglang.srt.entrypoints.engine import Engine

    if not hasattr(Engine._ensure_event_loop, "csa2"):
        Engine._ensure_event_loop = _loading(Engine._ensure_event_loop)


def _loading(ensure_event_loop: Callable[[], asyncio.AbstractEventLoop]) -> Callable[..., asyncio.AbstractEventLoop]:
    @functools.wraps(ensure_event_loop)
    def ensure(engine: Any = None) -> asyncio.AbstractEventLoop:  # without an engine when called on the class
        loop = ensure_event_loop()
        if engine is not None and getattr(engine, "loop", None) is None:
            load_documents(engine, loop)
        return loop

    ensure.csa2 = True  # type: ignore[attr-defined]
    return ensure


def load_documents(engine: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Pin the folder of an engine, if it was given one.

    Raises:
        OptionError: a document cannot be pinned, or `loop` runs already. The engine is shut down.
    """
    folder = getattr(engine.server_args, "csa2_documents", None)
    if folder is None:
        return
    try:
        _run(loop, folder, load_folder(folder, engine.tokenizer_manager, engine.template_manager))
    except Exception:
        engine.shutdown()  # the caller gets no engine that it could shut down
        raise


def _run(loop: asyncio.AbstractEventLoop, folder: str, loading: Coroutine[Any, Any, None]) -> None:
    if loop.is_running():
        loading.close()
        raise OptionError(
            f"csa2_documents={folder!r} cannot be loaded inside a running event loop: make the Engine before the loop "
            f"starts, or leave csa2_documents out"
        )
    loop.run_until_complete(loading)
