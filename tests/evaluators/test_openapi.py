"""Random requests against a real server, made from its own description of its interface."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig

from evaluation.runs import checkpoint
from evaluation.servers import live
from properties import examples
from waiting import LIMIT_S

# The stream of events does not end, and a drain ends the server.
APART = ["/api/v1/events", "/api/v1/drain"]
CHECKS = {
    # A path must exist on the server, and a profile in its configuration: no schema can say so.
    "positive_data_acceptance": {"enabled": False},
    # A random body may be too large, which is said before it is looked at.
    "negative_data_rejection": {"expected-statuses": [400, 401, 404, 405, 406, 413, 422]},
}


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with live(tmp_path_factory.mktemp("server")) as server:
        server.ended(server.submit(checkpoint(server.root / "run", 5), step=5))
        config = SchemathesisConfig.from_dict({"checks": CHECKS, "request-timeout": LIMIT_S})
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)
        assert "Traceback" not in server.told()


described = schemathesis.pytest.from_fixture("description").exclude(path=APART)


@described.parametrize()
@settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_what_the_description_says(case: "schemathesis.Case[Any]") -> None:
    case.call_and_validate()
