"""The queue of requests answers like a plain list that is sorted anew at every question."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cacheflow.scheduling.queue import Queue

items = st.sampled_from("abcdef")
steps = st.lists(
    st.tuples(st.sampled_from(["put", "park", "drop", "tidy"]), items, st.integers(-3, 3)),
    max_size=80,
)


@given(steps=steps)
def test_the_most_urgent_is_found_whatever_happened_before(
    steps: list[tuple[str, str, int]],
) -> None:
    """Ranks that change, items that are parked, taken out and come again: of those that wait, and
    of those that are parked, the first is named, by its latest rank."""
    queue, known = Queue(), {}
    for step, item, key in steps:
        rank = (0, float(key), ord(item))
        if step == "put":
            queue.put(item, rank)
            known[item] = (rank, False)
        elif step == "park":
            queue.park(item, rank)
            known[item] = (rank, True)
        elif step == "drop":
            queue.drop(item)
            known.pop(item, None)
        else:
            queue.tidy()
        for parked, found in ((False, queue.waiting()), (True, queue.parked())):
            entries = [(rank, name) for name, (rank, there) in known.items() if there is parked]
            assert found == min(entries, default=None)
        assert len(queue) == len(known)
        assert queue.is_parked(item) is known.get(item, (None, False))[1]
