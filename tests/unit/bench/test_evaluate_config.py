"""What configurations of measurements take together, and what they refuse."""

import pytest

from moray.bench.configs import EvaluateConfig
from moray.config import validate
from moray.errors import ConfigError

VALUES = {
    "target": {"model": "x"},
    "drafters": ["moa"],
    "trees": [{"type": "chain", "depth": 3}],
    "questions": "q.jsonl",
    "output": "out",
}


def test_typical_acceptance_takes_its_temperatures_from_temperatures():
    typical = {"acceptance_method": "typical", "typical_delta": 0.2}
    config = validate(EvaluateConfig, VALUES | {"sampling": typical, "temperatures": [0.7, 1]})
    assert [params.temperature for params in config.samplings] == [0.7, 1.0]
    assert {(params.acceptance_method, params.typical_delta) for params in config.samplings} == {("typical", 0.2)}
    assert validate(EvaluateConfig, config.model_dump(mode="json")) == config


@pytest.mark.parametrize("temperatures", [[], [0], [0, 1], [1, 0]])
def test_typical_acceptance_at_temperature_0_is_refused(temperatures):
    with pytest.raises(ConfigError, match="typical acceptance needs one of 1e-05 or more"):
        validate(EvaluateConfig, VALUES | {"sampling": {"acceptance_method": "typical"}, "temperatures": temperatures})
