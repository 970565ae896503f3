"""Token ids of documents: what is kept begins every prompt that begins with the text, and the text can be had back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from csa2.documents import DocumentBody
from csa2.errors import DocumentConflictError
from sglang_csa2.document_tokens import document_text, token_ids

FOLLOWERS = ("a", "A", "é", "日", "7", " ", " a", " 7", "\t", "\n", "\n\n", ".", ", ", "'s", '"', "-", "(", "<|")
"""One of each kind that tokenizers tell apart."""
ENDS = ("", " ", "\n", "\n\n", "   ", ".", "wor", " 12", "it'", "<", "é", "日本", "\u200d", "(", "=" * 300, " " * 300)
PIECES = st.sampled_from([*FOLLOWERS, "ld", "the", "  ", "2", "s", "=", "|im_start|>", "<|im_end|>", "\r\n", "本"])


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


def kept(tokenizer: Any, text: str) -> list[int]:
    return token_ids(DocumentBody(id="a", text=text), SimpleNamespace(tokenizer=tokenizer), None)


@pytest.mark.parametrize("end", ENDS)
def test_what_is_kept_begins_every_longer_text(tokenizer: Any, end: str) -> None:
    text = "The harbour opens at seven. " * 20 + end
    ids = kept(tokenizer, text)
    assert tokenizer.encode(text)[: len(ids)] == ids
    for follower in (*FOLLOWERS, "ld", "   x", "34", "=="):
        assert tokenizer.encode(text + follower)[: len(ids)] == ids, follower


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=80), end=PIECES, following=st.lists(PIECES))
def test_what_is_kept_begins_any_longer_text(tokenizer: Any, text: str, end: str, following: list[str]) -> None:
    text = text + end
    ids = kept(tokenizer, text)
    assert tokenizer.encode(text + "".join(following))[: len(ids)] == ids


def test_little_is_given_up(tokenizer: Any) -> None:
    text = "It opens at seven in the morning.\n"
    assert tokenizer.decode(kept(tokenizer, text)) == "It opens at seven in the"
    unbroken = "".join(chr(0x4E00 + i) for i in range(500))
    assert len(tokenizer.decode(kept(tokenizer, unbroken))) > 400


def test_ids_are_kept_as_they_are_given() -> None:
    assert token_ids(DocumentBody(id="a", input_ids=[1, 2, 3]), None, None) == [1, 2, 3]


def test_the_text_of_a_text_is_itself(tokenizer: Any) -> None:
    assert document_text(DocumentBody(id="a", text="  x\n"), [], 0, tokenizer) == "  x\n"


def test_the_text_of_a_chat_is_tokenised_to_the_chat(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "You are a librarian. " * 20}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    text = document_text(DocumentBody(id="a", messages=messages), ids, len(ids), tokenizer)
    assert text.startswith("<|im_start|>system\nYou are")
    assert tokenizer.encode(text) == ids


class WithStart:
    """A tokenizer that begins every text with the token 1, which reads <s>."""

    bos_token = "<s>"

    def encode(self, text: str) -> list[int]:
        return [1] + [1 if part == "\0" else ord(part) for part in text.replace("<s>", "\0")]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join("<s>" if i == 1 else chr(i) for i in ids)


def test_the_start_is_not_written_twice() -> None:
    assert document_text(DocumentBody(id="a", input_ids=[1, 65, 66]), [1, 65, 66], 3, WithStart()) == "AB"


def test_tokens_of_no_text_are_refused(tokenizer: Any) -> None:
    ids = [tokenizer.encode("a")[0]] * 64  # "aaaa..." has longer tokens
    with pytest.raises(DocumentConflictError, match="no text that is tokenised to its 64 tokens"):
        document_text(DocumentBody(id="a", input_ids=ids), ids, 64, tokenizer)
    with pytest.raises(DocumentConflictError, match="no tokenizer"):
        document_text(DocumentBody(id="a", input_ids=ids), ids, 64, None)
