"""What a distillation is refused for before anything is loaded."""

import pytest
from tiny_drafters import DRAFTERS

from moray.cluster.training.configs import DistillConfig, SparsifyConfig
from moray.config import validate
from moray.errors import ConfigError

GIVEN = {"target": {"model": "m"}, "activations": "a", "output": "o", "optim": {"type": "adamw"}}


@pytest.mark.parametrize("kind", ["glide", "medusa", "independent"])
def test_a_feature_loss_without_features_is_refused(kind):
    drafter = DRAFTERS[kind][0].model_dump(mode="json")
    with pytest.raises(ConfigError, match=rf"losses\.feature is 1\.0, but .* '{kind}' predicts no features: give loss"):
        validate(DistillConfig, GIVEN | {"drafter": drafter})
    assert validate(DistillConfig, GIVEN | {"drafter": drafter, "losses": {"feature": 0.0}}).losses.kl == 0.1


@pytest.mark.parametrize("kind", ["moa", "eagle"])
def test_drafters_of_features_take_it(kind):
    assert validate(DistillConfig, GIVEN | {"drafter": DRAFTERS[kind][0].model_dump(mode="json")}).losses.feature == 1.0


def test_what_needs_no_training_cannot_be_distilled():
    with pytest.raises(
        ConfigError, match=r"'drafter\.type' is \"ngram\": accepted are moa, dynamic-moa, eagle, eagle3, glide, "
    ):
        validate(DistillConfig, GIVEN | {"drafter": {"type": "ngram"}})


def test_losses_of_nothing_are_refused():
    losses = {"feature": 0.0, "kl": 0.0}
    with pytest.raises(ConfigError, match="nothing to learn from"):
        validate(DistillConfig, GIVEN | {"drafter": DRAFTERS["moa"][0].model_dump(mode="json"), "losses": losses})


def test_training_that_would_begin_late_is_refused():
    losses = {"feature": 0.0, "kl": 0.0, "total_variation": 1.0, "total_variation_start_share": 0.5}
    message = r"total_variation_start_share is 0\.5, and no other loss has a weight.* give losses\.kl or "
    with pytest.raises(ConfigError, match=message + r"losses\.feature"):
        validate(DistillConfig, GIVEN | {"drafter": DRAFTERS["moa"][0].model_dump(mode="json"), "losses": losses})
    with pytest.raises(ConfigError, match=message + r"sparse\.ce_weight"):
        validate(SparsifyConfig, GIVEN | {"losses": losses})
    validate(SparsifyConfig, GIVEN | {"losses": losses, "sparse": {"ce_weight": 1.0}})
