"""When the agreement guard takes a sample, and how samples are judged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2.agreement import WINDOW_SAMPLES, AgreementWindow

fixed = settings(derandomize=True, deadline=None, max_examples=200)


def judge(samples: list[bool], minimum: float) -> list[int]:
    """After which samples too few agreed."""
    window = AgreementWindow(1.0, minimum)
    return [i for i, agrees in enumerate(samples, 1) if window.note(agrees)]


@fixed
@given(st.floats(0.0005, 1), st.lists(st.integers(1, 40), min_size=1, max_size=300))
def test_the_share_of_the_steps_is_kept(share: float, batches: list[int]) -> None:
    """Each time it is due a sample is taken: one an interval, whatever the batches; at most one a batch."""
    window = AgreementWindow(share, 0.9)
    taken = steps = 0
    for batch in batches:
        steps += batch
        if window.count(batch):
            window.take()
            taken += 1
    assert taken <= steps // window.interval_steps
    if max(batches) <= window.interval_steps:
        assert taken == steps // window.interval_steps


def test_a_sample_that_cannot_be_taken_stays_due_and_is_not_made_up_for() -> None:
    window = AgreementWindow(0.1, 0.9)
    assert [window.count(4) for _ in range(10)] == [False, False, *[True] * 8]
    window.take()
    assert [window.count(1) for _ in range(10)] == [False] * 9 + [True]


@pytest.mark.parametrize(("agreeing", "verdict"), [(90, []), (89, [WINDOW_SAMPLES])])
def test_a_window_is_judged_when_it_is_full(agreeing: int, verdict: list[int]) -> None:
    samples = [True] * agreeing + [False] * (WINDOW_SAMPLES - agreeing)
    assert judge(samples[:-1], 0.9) == []
    assert judge(samples, 0.9) == judge(samples[::-1], 0.9) == verdict


@fixed
@given(st.lists(st.booleans(), max_size=5 * WINDOW_SAMPLES), st.floats(0, 1))
def test_each_sample_is_judged_once(samples: list[bool], minimum: float) -> None:
    whole = range(WINDOW_SAMPLES, len(samples) + 1, WINDOW_SAMPLES)
    wanted = [end for end in whole if sum(samples[end - WINDOW_SAMPLES : end]) < minimum * WINDOW_SAMPLES]
    assert judge(samples, minimum) == wanted


def test_agreement_is_that_of_the_last_window() -> None:
    window = AgreementWindow(0.001, 0.9)
    assert (window.agreement, window.interval_steps) == (None, 1000)
    window.note(True)
    window.note(False)
    assert window.agreement == 0.5
    for _ in range(WINDOW_SAMPLES - 1):
        window.note(True)
    assert window.agreement == (WINDOW_SAMPLES - 1) / WINDOW_SAMPLES
    window.restart()
    assert window.agreement is None
    assert (window.compared_total, window.agreed_total) == (WINDOW_SAMPLES + 1, WINDOW_SAMPLES)
