"""The protocol of the check and its repeated passages."""

import pytest

from csa2.check.errors import CheckError
from csa2.check.prompts import CUE_TOKENS, FIRST_PAGE, PASSAGE_TOKENS, Protocol, copy_probes


def find(passage, tokens):
    return next(i for i in range(len(tokens)) if tuple(tokens[i : i + len(passage)]) == passage)


@pytest.mark.parametrize("context", [512, 1024, 4096])
def test_passages_lie_in_the_compressed_text_side_by_side(context):
    protocol = Protocol(context=context, score_tokens=64, copies=2, seed=3)
    protocol.validate()
    tokens = list(range(protocol.document_tokens))
    last = FIRST_PAGE
    for probe in copy_probes(tokens, protocol, 0):
        start = find(probe.passage, tokens)
        assert start >= last
        last = start + len(probe.passage)
        assert PASSAGE_TOKENS[0] <= len(probe.passage) <= PASSAGE_TOKENS[1]
        assert CUE_TOKENS[0] <= probe.cue <= CUE_TOKENS[1]
    assert last <= context + 64 - 256


def test_passages_lie_about_2700_tokens_back():
    protocol = Protocol()
    tokens = list(range(protocol.document_tokens))
    back = [4608 - find(probe.passage, tokens) for probe in copy_probes(tokens, protocol, 0)]
    assert len(back) == protocol.copies
    assert all(2700 - 512 < distance <= 2700 + 512 for distance in back)


def test_passages_depend_on_seed_and_document_alone():
    tokens = list(range(5000))
    probes = copy_probes(tokens, Protocol(seed=1), 0)
    assert copy_probes(tokens, Protocol(seed=1), 0) == probes
    assert copy_probes(tokens, Protocol(seed=2), 0) != probes
    assert copy_probes(tokens, Protocol(seed=1), 1) != probes


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"context": 100}, "--context 100 is not a positive multiple of 64"),
        ({"context": 0}, "--context 0"),
        ({"score_tokens": 63}, "--score-tokens 63"),
        ({"copies": -1}, "--copies -1 is negative"),
        ({"copies": 11}, "--copies 11 passages do not fit"),
        ({"context": 256, "score_tokens": 64, "copies": 1}, "do not fit into --context 256: 0 do"),
    ],
)
def test_unusable_protocols_are_refused(fields, said):
    with pytest.raises(CheckError, match=said):
        Protocol(**fields).validate()
