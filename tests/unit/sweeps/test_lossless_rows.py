"""A text that is not the target's is noticed wherever a sweep has measured one."""

import pytest

from moray.bench.lossless import check_lossless
from moray.errors import LosslessError
from sweeps.reports.lossless import lossless_rows

TRIALS = [{"name": "one", "figures": {"lossless": True}}, {"name": "two", "figures": {}}]


@pytest.mark.parametrize(
    ("summary", "named"),
    [
        ({"trials": [*TRIALS, {"name": "three", "figures": {"lossless": False}}]}, "three"),
        (
            {"trials": TRIALS, "sure": {"finalists": [{"name": "one", "seeds": {"7": {"lossless": False}}}]}},
            "one from seed 7",
        ),
        (
            {"trials": TRIALS, "drafters": {"moa": {"finalists": [{"name": "one", "figures": {"lossless": False}}]}}},
            "one as a finalist",
        ),
    ],
)
def test_the_measurement_is_named(summary, named):
    with pytest.raises(LosslessError, match=f": {named}\\."):
        check_lossless(lossless_rows(summary))


def test_nothing_is_said_where_all_is_well():
    finalists = [{"name": "one", "seeds": {"0": {"lossless": True}, "1": {"lossless": None}}}]
    check_lossless(lossless_rows({"trials": TRIALS, "sure": {"finalists": finalists}}))
