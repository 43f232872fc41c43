import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.slots import Slots, visible_devices


@pytest.mark.parametrize(
    ("text", "first", "total"),
    [("0,1", (0, 1), 2), (" 3 ", (3,), 1), (2, (0, 1), 2), (0, (), 1), (None, (), 1), ("", (), 1)],
)
def test_text_counts_and_nothing_are_understood(
    text: str | int | None, first: tuple[int, ...], total: int
) -> None:
    slots = Slots.parse(text)
    assert slots.total == slots.free == total
    assert slots.take(total) == first


@pytest.mark.parametrize("text", ["0,0", "a", "0;1", "-1", "1,", -1])
def test_what_means_no_gpus_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError):
        Slots.parse(text)


def test_a_job_for_more_than_there_are_is_refused_with_both_numbers() -> None:
    with pytest.raises(EvaluationError, match="needs 3 GPUs") as caught:
        Slots.parse("4,5").check(3)
    assert "at most 2" in str(caught.value)
    with pytest.raises(EvaluationError, match="one CPU slot"):
        Slots.parse(None).check(2)
    Slots.parse(None).check(1)


def test_the_cpu_has_one_slot() -> None:
    slots = Slots(())
    assert slots.take(1) == ()
    assert slots.take(1) is None
    assert not slots.adopt(())
    slots.give_back(())
    assert slots.adopt(())


def test_what_is_not_lent_cannot_be_given_back() -> None:
    for slots, gpus in ((Slots((0, 1)), (0,)), (Slots((0,)), (5,)), (Slots(()), ())):
        with pytest.raises(RuntimeError, match="not lent"):
            slots.give_back(gpus)


def test_the_numbers_are_what_cuda_reads() -> None:
    assert visible_devices((0, 3)) == "0,3"
    assert visible_devices(()) == ""


Step = tuple[str, int]


@given(
    gpus=st.sets(st.integers(0, 9)),
    steps=st.lists(st.tuples(st.sampled_from(["take", "back", "adopt"]), st.integers(0, 9))),
)
def test_no_slot_is_ever_lent_twice(gpus: set[int], steps: list[Step]) -> None:
    slots = Slots(sorted(gpus))
    lent: list[tuple[int, ...]] = []
    for what, number in steps:
        if what == "take":
            taken = slots.take(number)
            assert (taken is None) == (slots.free < max(number, 1) if taken is None else False)
            lent += [] if taken is None else [taken]
        elif what == "adopt":
            wanted = (number,) if gpus else ()
            lent += [wanted] if slots.adopt(wanted) else []
        elif lent:
            slots.give_back(lent.pop(number % len(lent)))
        flat = [gpu for taken in lent for gpu in taken]
        assert len(flat) == len(set(flat))
        assert set(flat) <= gpus
        used = len(flat) if gpus else len(lent)
        assert slots.free == slots.total - used >= 0
