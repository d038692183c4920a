"""Keys of earlier versions: they work, with a notice, and by the side of new names nothing is lost."""

import re
from pathlib import Path

import pytest
import yaml

from moray.bench.configs import EvaluateConfig
from moray.cluster.training.configs import DistillConfig
from moray.config import load_config
from moray.decoding.engine.config import EngineConfig
from moray.decoding.params import SamplingParams
from moray.drafters.configs import TrainedConfig
from moray.errors import ConfigError
from moray.renamed import REMOVED_IN, _say
from serve.config import read_args
from sweeps.decoding.configs import TuneDecodingConfig
from sweeps.trainings.configs import SweepConfig

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 8}
OLD_RUN = {
    "target": {"model": "t"},
    "activations": "a",
    "output": "o",
    "drafter": {
        "type": "moa",
        "layer_self_attention": BLOCK,
        "self_attention": BLOCK,
        "cross_attention": BLOCK,
    },
    "losses": {"acceptance": 0.3},
    "optim": {"type": "muon"},
    "schedule": {"type": "linear", "final": 0.2},
    "train": {"accumulate": 2, "clip": 0.5, "checkpoint_steps": 7, "log_steps": 3},
}


@pytest.fixture(autouse=True)
def _unsaid():
    _say.cache_clear()  # notices are printed once per process


def written(folder, values) -> str:
    (folder / "old.yaml").write_text(yaml.safe_dump(values))
    return str(folder / "old.yaml")


def test_a_run_of_an_earlier_version_is_read(tmp_path, capsys):
    config = load_config(DistillConfig, [written(tmp_path, OLD_RUN)])
    train = config.train
    assert (train.gradient_accumulation_steps, train.max_grad_norm) == (2, 0.5)
    assert (train.save_steps, train.logging_steps) == (7, 3)
    assert config.losses.total_variation == 0.3
    assert config.schedule.min_lr_ratio == 0.2
    notices = capsys.readouterr().err.splitlines()
    assert len(notices) == 6
    assert f"note: 'train.clip' is now 'train.max_grad_norm'; the old name works until version {REMOVED_IN}" in notices


@pytest.mark.parametrize(
    ("config_class", "preset"),
    [
        (EvaluateConfig, "configs/evaluations/demo.yaml"),
        (TuneDecodingConfig, "configs/sweeps/decoding-demo.yaml"),
    ],
)
def test_the_length_of_a_sequence_has_one_name(config_class, preset, capsys):
    words = ["target.model=t"] if config_class is EvaluateConfig else []
    assert load_config(config_class, [str(REPOSITORY / preset), *words, "max_context=512"]).max_model_len == 512
    assert "note: 'max_context' is now 'max_model_len'" in capsys.readouterr().err


def test_the_length_of_a_sequence_has_one_name_in_a_sweep_of_trainings(capsys):
    preset = str(REPOSITORY / "configs/sweeps/target-layer-and-mask-width.yaml")
    assert load_config(SweepConfig, [preset, "decoding.max_context=512"]).decoding.max_model_len == 512
    assert "note: 'decoding.max_context' is now 'decoding.max_model_len'" in capsys.readouterr().err


def test_a_new_name_wins_over_the_old_one_of_a_file(tmp_path):
    config = load_config(DistillConfig, [written(tmp_path, OLD_RUN), "train.max_grad_norm=0.9"])
    assert config.train.max_grad_norm == 0.9
    assert config.train.gradient_accumulation_steps == 2
    config = load_config(DistillConfig, [written(tmp_path, OLD_RUN), "train.clip=0.8", "schedule.final=0.6"])
    assert (config.train.max_grad_norm, config.schedule.min_lr_ratio) == (0.8, 0.6)


def test_both_names_in_one_place_are_an_error(tmp_path):
    both = OLD_RUN | {"train": {"clip": 1.0, "max_grad_norm": 2.0}}
    message = "'train.clip' is the old name of 'train.max_grad_norm', and both are given: leave out 'clip'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(DistillConfig, [written(tmp_path, both)])


def test_a_wrong_value_is_told_by_its_new_name(tmp_path):
    with pytest.raises(ConfigError, match=r"'train.max_grad_norm' is -1"):
        load_config(DistillConfig, [written(tmp_path, OLD_RUN), "train.clip=-1"])


def test_every_setting_of_an_engine(tmp_path, capsys):
    old = {
        "max_sequences": 3, "kv_tokens": 128, "capacity": 64, "prefill_tokens": 32, "gathers": True, "num_groups": 2,
    }  # fmt: skip
    config = load_config(EngineConfig, [written(tmp_path, old)])
    assert (config.max_num_seqs, config.kv_cache_tokens, config.max_model_len) == (3, 128, 64)
    assert (config.max_num_batched_tokens, config.batch_admissions, config.num_micro_batches) == (32, True, 2)
    assert len(capsys.readouterr().err.splitlines()) == len(old)


def test_what_serve_is_given(capsys):
    config = read_args({"target": {"model": "m"}, "engine": {"max_sequences": 4}, "engine.max_num_seqs": "5"})
    assert config.engine.max_num_seqs == 5
    assert capsys.readouterr().err.count("\n") == 1


def test_values_have_new_names_too(tmp_path, capsys):
    assert load_config(SamplingParams, ["temperature=1.0", "rule=coupled"]).acceptance_method == "gumbel_coupled"
    assert "acceptance_method=coupled is now acceptance_method=gumbel_coupled" in capsys.readouterr().err
    assert load_config(SamplingParams, ["temperature=1.0", "rule=typical"]).acceptance_method == "typical"


def test_of_a_trained_drafter_and_a_sweep():
    assert load_config(TrainedConfig, ["type=trained", "folder=f", "effort=1"]).num_target_layers == 1
    words = ["distil=[a.yaml]", "space={train.clip: [0.5, 1.0]}", "output=o"]
    sweep = load_config(SweepConfig, [*words, "decoding={tree: {type: chain, depth: 2}, questions: q}"])
    assert sweep.distill == ("a.yaml",)


def test_old_names_and_new_ones_do_not_meet():
    """An old name that is a key again would be read as that key, and never renamed."""

    def classes(of):
        for each in of.__subclasses__():
            yield each
            yield from classes(each)

    from moray.config import Config

    found = [(cls, old, new) for cls in classes(Config) for old, new in cls.renamed.items()]
    assert len(found) >= 14
    for cls, old, new in found:
        assert old not in cls.model_fields, (cls, old)
        assert new in cls.model_fields, (cls, new)
