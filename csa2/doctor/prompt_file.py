"""Prompts of a file, one a line, as tokens or characters."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csa2.errors import OptionError

Unit = int | str
"""A token id or a character."""
MAX_PROMPTS = 1000


@dataclass(frozen=True)
class Prompts:
    """Prompts of one kind of units."""

    units: tuple[Sequence[Unit], ...]
    text: Callable[[Sequence[Unit]], str]
    """Of units that follow each other."""
    name: str
    """ "tokens" or "characters"."""
    reason: str = ""
    """Why they are characters."""


def read_prompts(path: Path) -> list[Any]:
    """Prompts of a file: a line is text, or JSON: a string, token ids, or an object with `prompt`, `text`, `input_ids` or
    `messages`, alone or as the `body` of a batch file.

    Raises:
        OptionError: it cannot be read, or a line is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--prompts {path} cannot be read ({error}): give a text file with one prompt a line") from error
    prompts = [_prompt(line, f"--prompts {path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if len(prompts) < 2:
        raise OptionError(f"--prompts {path} has {len(prompts)} prompts: give at least 2, one a line")
    return prompts[:MAX_PROMPTS]


def as_units(prompts: Sequence[Any], model: str | None) -> Prompts:
    """Prompts as tokens of the tokenizer of `model`, or as characters if it cannot be loaded.

    Args:
        model: folder or name; None: there is none.
    """
    if all(isinstance(prompt, list) for prompt in prompts):
        return Prompts(tuple(prompts), lambda ids: " ".join(map(str, ids)), "tokens")
    tokenizer, reason = _tokenizer(model)
    if tokenizer is None:
        characters = tuple(_characters(prompt) for prompt in prompts)
        return Prompts(characters, lambda units: "".join(map(str, units)), "characters", reason)
    tokens = tuple(_tokens(prompt, tokenizer) for prompt in prompts)
    return Prompts(tokens, lambda ids: str(tokenizer.decode(list(ids))), "tokens")


def _prompt(line: str, place: str) -> Any:
    """A string, a list of token ids, or a chat request (an object with `messages`)."""
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    if isinstance(value, dict) and not value.get("messages"):
        value = next((value[key] for key in ("prompt", "text", "input_ids") if key in value), None)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {"messages": value}
    is_ids = isinstance(value, list) and bool(value) and all(isinstance(item, int) for item in value)
    if isinstance(value, (str, dict)) or is_ids:
        return value
    if isinstance(value, (int, float)):
        return line  # a prompt that happens to be a number
    raise OptionError(
        f"{place} is no prompt: write text, a JSON string, token ids, or an object with prompt, text, input_ids or messages"
    )


def _tokenizer(model: str | None) -> tuple[Any, str]:
    """The tokenizer, or None and why there is none."""
    if model is None:
        return None, "no model is known: --model names one"
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model, local_files_only=True), ""
    except (ImportError, OSError, ValueError, KeyError) as error:
        return None, f"the tokenizer of {model} cannot be loaded here ({str(error).splitlines()[0]}): --model names a folder"


def _tokens(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    is_chat = isinstance(prompt, dict) and getattr(tokenizer, "chat_template", None) is not None
    if is_chat:
        text = tokenizer.apply_chat_template(
            prompt["messages"], tools=prompt.get("tools"), tokenize=False, add_generation_prompt=True
        )
    else:
        text = _characters(prompt)
    # A template writes the special tokens itself.
    ids: list[int] = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
    return ids


def _characters(prompt: Any) -> str:
    """A prompt as text, chats in a plain rendering of our own."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return " ".join(map(str, prompt))
    tools = json.dumps(prompt["tools"]) + "\n" if prompt.get("tools") else ""
    return tools + "".join(f"<{message.get('role')}>\n{_content(message)}\n" for message in prompt["messages"])


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
