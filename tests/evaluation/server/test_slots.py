import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.server.gpus import Slots, describe_slots


def test_a_job_for_more_than_there_are_is_refused_with_both_numbers() -> None:
    with pytest.raises(EvaluationError, match="needs 3 GPUs") as caught:
        Slots(("4", "MIG-8f3a")).check(3)
    assert "at most 2" in str(caught.value)
    assert "2 (4, MIG-8f3a)" in str(caught.value)
    with pytest.raises(EvaluationError, match="one CPU slot"):
        Slots(()).check(2)
    Slots(()).check(1)


@pytest.mark.parametrize(("gpus", "count"), [((), 1), ((), 0), (("0", "1"), 0)])
def test_the_cpu_has_one_slot(gpus: tuple[str, ...], count: int) -> None:
    slots = Slots(gpus)
    assert slots.take(count) == ()
    assert slots.take(count) is None
    assert not slots.adopt(())
    assert slots.take(len(gpus) or 1) == (gpus or None)
    slots.give_back(())
    assert slots.adopt(())


def test_what_is_not_in_use_cannot_be_given_back() -> None:
    for slots, gpus in ((Slots("01"), ("0",)), (Slots("0"), ("5",)), (Slots(()), ())):
        with pytest.raises(RuntimeError, match="not in use"):
            slots.give_back(gpus)


def test_numbers_are_lent_by_their_value_and_before_ids() -> None:
    slots = Slots(("GPU-8f3a", "10", "9"))
    assert [slots.take(1), slots.take(2)] == [("9",), ("10", "GPU-8f3a")]


def test_slots_are_shown_by_name() -> None:
    assert describe_slots(("6", "MIG-8f3a")) == "GPU 6, MIG-8f3a"
    assert describe_slots(()) == "the CPU"


Step = tuple[str, int]


@given(
    gpus=st.sets(st.sampled_from([*map(str, range(8)), "GPU-8", "MIG-9"])),
    steps=st.lists(st.tuples(st.sampled_from(["take", "back", "adopt"]), st.integers(0, 9))),
)
def test_no_slot_is_ever_lent_twice(gpus: set[str], steps: list[Step]) -> None:
    slots = Slots(sorted(gpus))
    lent: list[tuple[str, ...]] = []
    names = [*map(str, range(8)), "GPU-8", "MIG-9"]
    for what, number in steps:
        free = gpus.difference(*lent)
        if what == "take":
            count = min(number, len(gpus) or 1)
            taken = slots.take(count)
            needs_cpu = count == 0 or not gpus
            assert (taken is not None) == (() not in lent if needs_cpu else len(free) >= count)
            assert taken is None or len(taken) == (0 if needs_cpu else count)
            lent += [] if taken is None else [taken]
        elif what == "adopt":
            wanted = (names[number],) if number % 2 else ()
            adopted = slots.adopt(wanted)
            assert adopted == (free.issuperset(wanted) if wanted else () not in lent)
            lent += [wanted] if adopted else []
        elif lent:
            slots.give_back(lent.pop(number % len(lent)))
        flat = [gpu for taken in lent for gpu in taken]
        assert len(flat) == len(set(flat))
        assert set(flat) <= gpus
        assert lent.count(()) <= 1
