"""Oracle: the law of a grouping: every row once, no group over the budget, little padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teacher_server.engine.forward import SHORTEST_OF_GROUP, group_by_length


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 2000))
def test_every_row_is_in_one_group_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = list(group_by_length(lengths, max_padded_tokens=budget))

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert len(group) == 1 or longest * len(group) <= budget
        assert all(lengths[index] >= SHORTEST_OF_GROUP * longest for index in group)
