import pytest

from evaluation.running import script_profile
from unshard.evaluate.jobs import Job, Request, Status
from unshard.evaluate.server.queue.outcomes import find_removable


def job(name: str, at: float, **metrics: float) -> Job:
    found = {f"task/{key}": value for key, value in metrics.items()}
    request = Request("ckpt", "script", ("task",))
    return Job(name, request, Status.COMPLETED, 0.0, completed_at=at, metrics=found)


DONE = [job("a", 1, acc=0.5, loss=2), job("b", 2, acc=0.7, loss=3), job("c", 3, acc=0.7)]


@pytest.mark.parametrize(
    ("keep", "metric", "gone"),
    [
        ("none", None, ["c"]),
        ("all", None, []),
        ("best", "task/acc", ["a", "c"]),
        ("best", "-task/loss", ["b", "c"]),
        ("best", "task/other", ["a", "b", "c"]),
        ("best", None, ["c"]),
    ],
)
def test_what_stays_is_what_the_profile_says(
    keep: str, metric: str | None, gone: list[str]
) -> None:
    assert find_removable(DONE[2], script_profile(keep=keep, best_metric=metric), DONE) == gone
