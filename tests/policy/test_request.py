"""The transition table of a request's status."""

import itertools

import pytest
from fake_lane import engine_request

from ambidex.errors import AmbidexError, InvalidRequestError
from ambidex.request import TRANSITIONS, Request, RequestStatus

S = RequestStatus


def request_in(status: RequestStatus) -> Request:
    request = Request(engine_request("a", [1, 2, 3]), 0)
    request.status = status
    return request


def test_a_new_request_waits_and_has_computed_nothing() -> None:
    request = Request(engine_request("a", [1, 2, 3]), 0)
    assert request.status is S.WAITING
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.num_computed_tokens == request.num_in_flight_tokens == 0
    assert not request.is_finished


def test_output_tokens_are_those_after_the_prompt() -> None:
    request = Request(engine_request("a", [1, 2, 3]), 0)
    request.token_ids += [7, 8]
    assert list(request.output_token_ids) == [7, 8]
    assert request.num_output_tokens == 2


def test_the_prompt_given_is_not_changed_by_output() -> None:
    source = engine_request("a", [1, 2, 3])
    Request(source, 0).token_ids.append(9)
    assert source.prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize(("before", "after"), sorted(TRANSITIONS, key=str))
def test_allowed(before: RequestStatus, after: RequestStatus) -> None:
    request = request_in(before)
    request.move_to(after)
    assert request.status is after


@pytest.mark.parametrize(
    ("before", "after"), [p for p in itertools.product(S, S) if p not in TRANSITIONS]
)
def test_all_others_are_refused(before: RequestStatus, after: RequestStatus) -> None:
    request = request_in(before)
    with pytest.raises(InvalidRequestError, match=f"{before.name} -> {after.name}"):
        request.move_to(after)
    assert request.status is before


def test_the_table_is_the_architecture_pages() -> None:
    assert {after for before, after in TRANSITIONS if before is S.WAITING} == {
        S.TRANSFER,
        S.RUNNING,
        S.FINISHED,
    }
    assert {after for before, after in TRANSITIONS if before is S.PREEMPTED} == {
        S.WAITING,
        S.FINISHED,
    }
    assert not [after for before, after in TRANSITIONS if before is S.FINISHED]


def test_a_forbidden_transition_is_our_bug_and_never_a_clients() -> None:
    assert not issubclass(InvalidRequestError, AmbidexError)
