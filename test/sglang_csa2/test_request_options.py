"""Options of one request in its custom_params."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csa2.errors import OptionError
from csa2.facts import NO_CAP
from csa2.formats import make_ladder
from sgl_kernels.page_layout import PageGeometry
from sglang_csa2 import own_requests
from sglang_csa2.request_options import CAP, STATIC, RequestOptions, before_add_request_to_queue, cap_of, check_params

LADDER = make_ladder(PageGeometry(1, 1, 64, 64, torch.bfloat16), "fp4")


@pytest.mark.parametrize("params", [None, {}, {"thinking_budget": 5}, [1], {3: 4}])
def test_params_of_others_are_none_of_our_business(params: Any) -> None:
    assert check_params(params) == RequestOptions()


@pytest.mark.parametrize(("value", "ratio"), [(1, 1.0), (2, 2.0), (2.5, 2.5), (8, 8.0)])
def test_a_ratio(value: Any, ratio: float) -> None:
    assert check_params({"csa2_ratio": value, "other": True}) == RequestOptions(ratio)


@pytest.mark.parametrize("value", [0, 0.5, 9, -2, "2", None, True, math.nan, math.inf, [2], {"a": 1}, "x" * 10**6])
def test_nonsense_names_what_is_allowed(value: Any) -> None:
    with pytest.raises(OptionError, match="give a number from 1 to 8") as caught:
        check_params({"csa2_ratio": value})
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("value", [0, 1, "true", None, [True], {"a": True}, "x" * 10**6])
def test_static_is_true_or_false(value: Any) -> None:
    assert check_params({"csa2_static": True}) == RequestOptions(static=True)
    assert check_params({"csa2_static": False}) == RequestOptions()
    with pytest.raises(OptionError, match=r"custom_params csa2_static is .*: give true or false") as caught:
        check_params({"csa2_static": value})
    assert len(str(caught.value)) < 150


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(OptionError, match="'csa2_ration', which does not exist"):
        check_params({"csa2_ration": 2})


def test_the_cap_is_a_format_of_the_ladder() -> None:
    assert cap_of(1.0, LADDER) == cap_of(8.0, LADDER) == LADDER.warm


class FakeRequest:
    def __init__(self, params: Any) -> None:
        self.sampling_params = SimpleNamespace(custom_params=params)
        self.aborted: list[str] = []

    def set_finish_with_abort(self, message: str) -> None:
        self.aborted.append(message)


def scheduler_with(guard: Any = None) -> Any:
    return SimpleNamespace(csa2_steward=SimpleNamespace(store=SimpleNamespace(ladder=LADDER), guard=guard))


def queued(params: Any) -> FakeRequest:
    request = FakeRequest(params)
    scheduler = scheduler_with()
    before_add_request_to_queue(scheduler, request)
    before_add_request_to_queue(scheduler, request)  # after a retraction
    return request


def test_a_request_is_marked_once() -> None:
    assert getattr(queued({"csa2_ratio": 1}), CAP) == LADDER.warm
    assert getattr(queued(None), CAP) == NO_CAP
    assert getattr(queued({"csa2_static": True}), STATIC)
    assert not getattr(queued(None), STATIC)


def test_nonsense_ends_the_request() -> None:
    (message,) = queued({"csa2_ratio": "many"}).aborted
    assert "custom_params csa2_ratio is 'many'" in message


def test_without_csa2_nothing_is_looked_at() -> None:
    request = FakeRequest({"csa2_ratio": "many"})
    before_add_request_to_queue(SimpleNamespace(), request)
    assert request.aborted == []


def test_the_guard_gives_way_to_clients_and_not_to_requests_of_our_own() -> None:
    given: list[str] = []
    scheduler = scheduler_with(SimpleNamespace(give_way=lambda: given.append("way")))

    class Owner:
        def queued(self, req: Any) -> None:
            given.append("queued")

    def queue() -> FakeRequest:
        request = FakeRequest(None)
        before_add_request_to_queue(scheduler, request)
        return request

    client = queue()
    assert (given, own_requests.owner_of(client)) == (["way"], None)
    owner: Any = Owner()
    made: list[Any] = []
    scheduler.handle_generate_request = lambda _: made.append(queue())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_requests, "tokenized_request", lambda *_, **__: None)
        own_requests.submit(scheduler, owner, "rid", [1], 1, None)
    assert (given, own_requests.owner_of(made[0])) == (["way", "queued"], owner)
    queue()
    assert given == ["way", "queued", "way"]
