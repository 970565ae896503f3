"""Token ids of documents, as SGLang makes those of requests that go on from them, and the text that gives these ids.

The last tokens of a text can become others when something follows: "wor" and "ld" are not "world". Tokenizers look at words,
so the last word and what follows it are left out: what is kept begins every prompt that begins with the text.

UPSTREAM(sglang 0.5.23): `OpenAIServingTokenize._tokenize_chat_request` renders messages as they stand, without opening a
turn for the answer, which would differ from the turn that follows.
"""

import re
from collections.abc import Sequence
from typing import Any

from csa2.documents import DocumentBody
from csa2.errors import DocumentConflictError, DocumentError

MAX_WORD_CHARS = 64
"""Of a last word that is left out; scripts without spaces, and long lines of one sign, have no end of a word."""


def token_ids(asked: DocumentBody, tokenizer_manager: Any, template_manager: Any) -> list[int]:
    """Token ids of a document.

    Raises:
        DocumentError: the server has no tokenizer, or the chat template takes no such messages.
    """
    if asked.input_ids is not None:
        return asked.input_ids
    if tokenizer_manager.tokenizer is None:
        raise DocumentError("the server has no tokenizer (--skip-tokenizer-init): give input_ids")
    if asked.text is not None:
        return settled_ids(asked.text, tokenizer_manager.tokenizer)
    return _chat_ids(asked, tokenizer_manager, template_manager)


def settled_ids(text: str, tokenizer: Any) -> list[int]:
    """The token ids of `text` that stay when something comes after it."""
    ids: list[int] = tokenizer.encode(text)
    last_word = re.search(r"\s+\S+\s*$", text[-MAX_WORD_CHARS:])
    dropped = min(len(text), MAX_WORD_CHARS) - (0 if last_word is None else last_word.start())
    return ids[: _same(ids, tokenizer.encode(text[: len(text) - dropped]))]


def document_text(asked: DocumentBody, ids: Sequence[int], kept: int, tokenizer: Any) -> str:
    """The text that a prompt begins with to find a document.

    Args:
        ids: what `token_ids` gave.
        kept: tokens in whole pages, which are pinned.

    Raises:
        DocumentConflictError: no text is tokenised to these ids, or the server has no tokenizer.
    """
    if asked.text is not None:
        return asked.text
    if tokenizer is None:
        raise DocumentConflictError(
            f"document {asked.id!r} has no text: the server has no tokenizer (--skip-tokenizer-init)"
        )
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # A chat template may write the token that the tokenizer begins every text with.
    for candidate in (text, text.removeprefix(tokenizer.bos_token or "")):
        if _same(ids, tokenizer.encode(candidate)) >= kept:
            return candidate
    raise DocumentConflictError(
        f"document {asked.id!r} has no text that is tokenised to its {kept} tokens: send input_ids, or pin it as text"
    )


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the beginning that two sequences have in common."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def _chat_ids(asked: DocumentBody, tokenizer_manager: Any, template_manager: Any) -> list[int]:
    from jinja2 import TemplateError
    from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

    serving = OpenAIServingTokenize(tokenizer_manager, template_manager)
    try:
        request = TokenizeRequest(messages=asked.messages, add_generation_prompt=False)
        ids: list[int] = serving._tokenize_chat_request(request)
    except (ValueError, TypeError, KeyError, TemplateError) as error:  # of pydantic and of chat templates
        raise DocumentError(f"messages cannot be rendered: {_first_line(error)}") from error
    return ids


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
