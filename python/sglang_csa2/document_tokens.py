"""Token ids of documents, as SGLang makes those of requests that go on from them.

UPSTREAM(sglang 0.5.23): `OpenAIServingTokenize._tokenize_chat_request` renders messages as they stand, without opening a
turn for the answer, which would differ from the turn that follows.
"""

from typing import Any

from csa2.documents import DocumentBody
from csa2.errors import DocumentError


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
        ids: list[int] = tokenizer_manager.tokenizer.encode(asked.text)
        return ids
    return _chat_ids(asked, tokenizer_manager, template_manager)


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
