"""What ranks saved, under one set of names: plain values in, plain values out."""

from collections.abc import Sequence

import numpy as np
import pytest

from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.read.training_state.rng_states import RankState, StateWriter, rank_state, unite
from unshard.tensors.dtypes import BY_NAME

UINT8 = BY_NAME["uint8"]


def state(number: int) -> SavedTensor:
    return SavedTensor(UINT8, (2,), bytes([number, number]))


def rank(number: int, **more: Plain) -> RankState:
    return RankState({"cpu": state(number), "random": number, **more}, {})


def united(states: Sequence[RankState | None]) -> tuple[dict[str, Plain], dict[str, Plain], str]:
    found, notes = unite(states)
    rng = found.get("rng", {})
    assert isinstance(rng, dict)
    return found, rng, "; ".join(notes)


def test_extra_state_of_verl_and_lmms_engine() -> None:
    verl = rank_state(StateWriter.EXTRA_STATE, {"lr_scheduler": None, "rng": {"cpu": state(1)}})
    assert verl == RankState({"cpu": state(1)}, {"lr_scheduler": None})
    lmms = {"lr_scheduler_state": {"last_epoch": 3}, "rng": {"random": 1}, "total_tokens": 5}
    assert rank_state(StateWriter.EXTRA_STATE, lmms) == RankState(
        {"random": 1}, {"lr_scheduler": {"last_epoch": 3}, "total_tokens": 5}
    )


def test_rng_state_of_trainer() -> None:
    value = {"python": 1, "numpy": 2, "cpu": state(3), "cuda": [state(4)], "xla": 7}
    found = rank_state(StateWriter.TRAINER, value)
    expected = {"random": 1, "numpy": 2, "cpu": state(3), "cuda": [state(4)], "xla": 7}
    assert found == RankState(expected, {})


def test_random_states_of_accelerate() -> None:
    value = {
        "step": 9,
        "random_state": 1,
        "numpy_random_seed": 2,
        "torch_manual_seed": state(3),
        "torch_cuda_manual_seed": [state(4)],
        "torch_xpu_manual_seed": [state(5)],
        "xm_seed": 6,
    }
    assert rank_state(StateWriter.ACCELERATE, value) == RankState(
        {
            "random": 1,
            "numpy": 2,
            "cpu": state(3),
            "cuda": [state(4)],
            "xpu": [state(5)],
            "xla": 6,
        },
        {"step": 9},
    )


@pytest.mark.parametrize("value", [[1], 3, {1: 2}, {"rng": [1]}])
def test_what_such_files_do_not_hold(value: Plain) -> None:
    assert rank_state(StateWriter.EXTRA_STATE, value) is None


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_numpys_state_gets_lists_for_its_arrays(form: str) -> None:
    key = np.arange(624, dtype=np.uint32)
    saved = SavedTensor(BY_NAME["uint32"], (624,), key.tobytes())
    value: Plain = ("MT19937", saved, 624, 0, 0.0)
    expected: Plain = ("MT19937", key.tolist(), 624, 0, 0.0)
    if form == "dict":
        value, expected = {"state": {"key": saved}}, {"state": {"key": key.tolist()}}
    found = rank_state(StateWriter.EXTRA_STATE, {"rng": {"numpy": value}})
    assert found is not None
    assert found.rng["numpy"] == expected


def test_processes_have_the_first_ranks_state_and_all_next_to_it() -> None:
    found, rng, notes = united([rank(0), rank(1), rank(2)])
    assert rng == {"cpu": state(0), "random": 0}
    assert found["rng_by_rank"] == [rank(number).rng for number in range(3)]
    assert notes == ""


def test_devices_are_listed_in_rank_order() -> None:
    states = [rank(number, cuda=state(10 + number)) for number in range(3)]
    _, rng, notes = united(states)
    assert rng["cuda"] == [state(10), state(11), state(12)]
    assert notes == ""


def test_of_all_devices_of_a_node_each_rank_gives_its_own() -> None:
    saw = [[state(10 * number + device) for device in range(2)] for number in range(4)]
    on_two_nodes = [rank(number, cuda=saw[number]) for number in range(4)]
    _, rng, _ = united(on_two_nodes)
    assert rng["cuda"] == [state(0), state(11), state(20), state(31)]
    _, rng, _ = united(on_two_nodes[:2])
    assert rng["cuda"] == [state(0), state(11)]
    _, rng, _ = united([rank(number, npu=[state(number)]) for number in range(3)])
    assert rng["npu"] == [state(0), state(1), state(2)]


def test_a_single_process_keeps_all_its_devices() -> None:
    _, rng, _ = united([rank(0, cuda=[state(1), state(2)], xpu=state(3))])
    assert rng["cuda"] == [state(1), state(2)]
    assert rng["xpu"] == [state(3)]


def test_devices_that_do_not_tell_whose_they_are_stay_with_their_ranks() -> None:
    saw = [state(device) for device in range(2)]
    found, rng, notes = united([rank(number, cuda=saw) for number in range(3)])
    assert "cuda" not in rng
    assert "rng.cuda was left out: rank 0 saved 2 devices, of 3 ranks" in notes
    assert found["rng_by_rank"] == [rank(number, cuda=saw).rng for number in range(3)]


def test_a_missing_rank_leaves_no_rank_order() -> None:
    states = [rank(0, cuda=state(10)), None, rank(2, cuda=state(12))]
    found, rng, notes = united(states)
    assert rng == {"cpu": state(0), "random": 0}
    assert "rng.cuda was left out: none was saved by rank 1;" in notes
    by_rank = found["rng_by_rank"]
    assert isinstance(by_rank, list)
    assert by_rank[1] is None


def test_without_rank_0_the_next_one_is_taken_and_reported() -> None:
    _, rng, notes = united([None, rank(1), rank(2)])
    assert rng == {"cpu": state(1), "random": 1}
    assert notes == "rng is that of rank 1: rank 0 saved none"


def test_other_values_are_the_first_ranks_and_by_rank_where_they_differ() -> None:
    states = [RankState({}, {"tokens": 5, "seconds": number}) for number in range(2)]
    found, _, notes = united(states)
    assert found == {"tokens": 5, "seconds": 0, "seconds_by_rank": [0, 1]}
    assert notes == ""


def test_schedulers_that_differ_are_reported() -> None:
    states = [RankState({}, {"lr_scheduler": {"last_epoch": number}}) for number in range(2)]
    found, _, notes = united(states)
    assert found["lr_scheduler"] == {"last_epoch": 0}
    assert found["lr_scheduler_by_rank"] == [{"last_epoch": 0}, {"last_epoch": 1}]
    assert notes == "lr_scheduler differs between ranks: the first rank's was taken"
    same = [RankState({}, {"lr_scheduler": {"best": float("nan")}}) for _ in range(2)]
    assert united(same)[2] == ""


def test_nothing_gives_nothing() -> None:
    assert unite([]) == ({}, ())
    assert unite([None, None]) == ({}, ())
