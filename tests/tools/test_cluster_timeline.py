"""What the campaign with faults of nodes demands of a run that went back."""

from __future__ import annotations

from math import inf

import pytest

from tools.crash.cluster.timeline import Presence, Rollback, Span, presence

_BACK = Rollback(Span(10, 12), Span(4, 6))
_AGAIN = Rollback(Span(20, 22), Span(14, 16))
_END = Span(30, 31)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (Span(1, 2), "must"),
        (Span(1, 5), "may"),  # while the point was saved
        (Span(5, 7), "may"),
        (Span(7, 8), "not"),
        (Span(9, 11), "may"),  # while the run went back
        (Span(13, 13.5), "must"),
        (Span(13, 15), "may"),
        (Span(17, 18), "not"),
        (Span(23, 24), "must"),
        (Span(23, inf), "may"),  # never acknowledged
        (Span(1, inf), "may"),
        (Span(29, 30.5), "may"),  # while it was looked at
        (Span(32, 33), "not"),
    ],
)
def test_a_change_is_there_unless_the_run_went_back_before_it(change: Span, wanted: Presence) -> None:
    assert presence(change, _END, [_BACK, _AGAIN]) == wanted


def test_a_moment_between_two_rollbacks_knows_the_first_alone() -> None:
    assert presence(Span(13, 13.5), Span(18, 19), [_BACK, _AGAIN]) == "must"
    assert presence(Span(7, 8), Span(18, 19), [_BACK, _AGAIN]) == "not"
    assert presence(Span(7, 8), Span(8.5, 9), [_BACK, _AGAIN]) == "must"
