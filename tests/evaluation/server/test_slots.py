import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.server.gpus import CPU, GPU, Gpus, Slots, describe_slots, gpus_of


def test_a_job_for_more_than_there_are_is_refused_with_both_numbers() -> None:
    with pytest.raises(EvaluationError, match="needs 3 GPUs") as caught:
        Slots(("4", "MIG-8f3a")).check(3)
    assert "at most 2" in str(caught.value)
    assert "2 (4, MIG-8f3a)" in str(caught.value)
    with pytest.raises(EvaluationError, match="slots of the CPU only"):
        Slots(()).check(2)
    Slots(()).check(1)


@pytest.mark.parametrize("gpus", [(), ("0", "1")])
@pytest.mark.parametrize("size", [1, 3])
def test_the_cpu_has_slots_of_its_own(gpus: Gpus, size: int) -> None:
    slots = Slots(gpus, cpu=size)
    assert slots.pool("any", 0) == CPU
    assert slots.pool("any", 1) == (GPU if gpus else CPU)
    taken = [slots.take(CPU, 0) for _ in range(size)]
    assert taken == [(f"cpu:{number}",) for number in range(1, size + 1)]
    assert slots.take(CPU, 0) is None
    assert slots.free_pools() == frozenset()
    if gpus:
        assert slots.take(GPU, 2) == gpus
    slots.give_back(("cpu:1",))
    assert slots.free_pools() == {CPU}
    assert slots.take(CPU, 1) == ("cpu:1",)


def test_the_jobs_of_a_profile_that_a_cluster_schedules_have_slots_of_their_own() -> None:
    slots = Slots(("0",), launched={"far": 2, "cpu": 1})
    assert [slots.pool(name, count) for name, count in (("far", 8), ("cpu", 0), ("near", 1))] == [
        "launch:far",
        "launch:cpu",
        GPU,
    ]
    assert [slots.take("launch:far", 8) for _ in range(3)] == [
        ("launch:far:1",),
        ("launch:far:2",),
        None,
    ]
    assert slots.free_pools() == {CPU, "launch:cpu"}
    assert slots.free() == {"0"}
    slots.give_back(("launch:far:1",))
    assert slots.take("launch:far", 1) == ("launch:far:1",)


def test_what_an_earlier_server_runs_is_adopted_also_where_there_are_fewer_slots_now() -> None:
    slots = Slots((), launched={"far": 1})
    assert slots.adopt(("launch:far:1",))
    assert slots.adopt(("launch:far:2",))
    assert slots.adopt(("launch:gone:7",))
    assert not slots.adopt(("launch:far:2",))
    slots.give_back(("launch:far:1",))
    assert slots.take("launch:far", 1) is None  # the other one still runs
    slots.give_back(("launch:far:2",))
    assert slots.take("launch:far", 1) == ("launch:far:1",)


def test_the_slot_of_the_cpu_of_an_older_server_has_no_name() -> None:
    slots = Slots(())
    assert slots.adopt(())
    assert not slots.adopt(())
    assert slots.take(CPU, 0) is None
    slots.give_back(())
    assert slots.take(CPU, 0) == ("cpu:1",)


def test_what_is_not_in_use_cannot_be_given_back() -> None:
    for slots, gpus in ((Slots("01"), ("0",)), (Slots("0"), ("5",)), (Slots(()), ())):
        with pytest.raises(RuntimeError, match="not in use"):
            slots.give_back(gpus)


def test_numbers_are_lent_by_their_value_and_before_ids() -> None:
    slots = Slots(("GPU-8f3a", "10", "9"))
    assert [slots.take(GPU, 1), slots.take(GPU, 2)] == [("9",), ("10", "GPU-8f3a")]


def test_gpus_can_be_left_out() -> None:
    slots = Slots("0123")
    assert slots.take(GPU, 2, but_for={"0", "2"}) == ("1", "3")
    assert slots.take(GPU, 1, but_for={"0", "2"}) is None
    assert slots.take(GPU, 1, but_for={"0"}) == ("2",)


def test_slots_are_shown_by_name() -> None:
    assert describe_slots(("6", "MIG-8f3a")) == "GPU 6, MIG-8f3a"
    assert describe_slots(()) == describe_slots(("cpu:2",)) == "the CPU"
    assert describe_slots(("launch:far:1",)) == "the cluster"
    assert [gpus_of(one) for one in (("6",), (), ("cpu:1",), ("launch:a:1",))] == [
        ("6",),
        (),
        (),
        None,
    ]


Step = tuple[str, int]


@given(
    gpus=st.sets(st.sampled_from([*map(str, range(8)), "GPU-8", "MIG-9"])),
    cpu=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(["take", "back", "adopt"]), st.integers(0, 9))),
)
def test_no_slot_is_ever_lent_twice(gpus: set[str], cpu: int, steps: list[Step]) -> None:
    slots = Slots(sorted(gpus), cpu=cpu)
    lent: list[Gpus] = []
    names = [*map(str, range(8)), "GPU-8", "MIG-9"]
    for what, number in steps:
        flat = {name for taken in lent for name in taken}
        free, on_cpu = gpus - flat, len(flat - gpus)
        if what == "take":
            count = min(number, len(gpus) or 1)
            pool = slots.pool("any", count)
            taken = slots.take(pool, count)
            needs_cpu = count == 0 or not gpus
            assert pool == (CPU if needs_cpu else GPU)
            assert (taken is not None) == (on_cpu < cpu if needs_cpu else len(free) >= count)
            assert taken is None or len(taken) == (1 if needs_cpu else count)
            lent += [] if taken is None else [taken]
        elif what == "adopt":
            wanted = (names[number],) if number % 2 else ("cpu:1",)
            adopted = slots.adopt(wanted)
            allowed = free if number % 2 else {"cpu:1"} - flat
            assert adopted == allowed.issuperset(wanted)
            lent += [wanted] if adopted else []
        elif lent:
            slots.give_back(lent.pop(number % len(lent)))
        every = [name for taken in lent for name in taken]
        assert len(every) == len(set(every))
        assert {name for name in every if not name.startswith("cpu:")} <= gpus
