"""Training of sparse targets: its forward pass is what the merged target computes, and its losses are the published
ones."""

import math
from pathlib import Path

import pytest
import torch
from one_step import as_data_shard
from shape_checks import unchecked
from tiny_batches import batch_of
from tiny_targets import MAX_POSITIONS, load_target

from moray.activations.capture.record import KVRecorder
from moray.cluster.training.configs import SparsifyConfig
from moray.config import validate
from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, TrainConfig
from moray.distill.loop import Progress, Span, train
from moray.distill.optim import Optimiser
from moray.distill.parallel import Replicas
from moray.distill.sparse.calibrate import measure_share
from moray.distill.sparse.configs import SparseConfig
from moray.distill.sparse.evicted_attention import attend_evicted
from moray.distill.sparse.learner import SparseLearner
from moray.distill.sparse.merge import write_sparse_target
from moray.drafters.learner import DraftView
from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.sparse.target import SparseTarget
from moray.targets.spec import TargetConfig

SPARSE = SparseConfig(first_layer=1, router_size=16, lora_rank=4, share=0.6)


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def tiny(tmp_path, request):
    return load_target(tmp_path / "dense", request.param)


def learner_of(tiny, config: SparseConfig = SPARSE, spread: float = 0.0) -> SparseLearner:
    torch.manual_seed(0)
    learner = SparseLearner(config, TargetHead.load(tiny.config, tiny.target.spec.num_layers))
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if spread and name.endswith("up"):
                parameter.normal_(std=0.1)
            if spread and "outer.weight" in name:
                parameter.mul_(spread)
            if spread and "outer.bias" in name:
                parameter.zero_()
    return learner


def view_of(batch, progress: float = 1.0) -> DraftView:
    seq = batch.tokens.shape[1]
    return DraftView((torch.arange(seq) - 1).clamp(min=0).expand_as(batch.tokens), None, 7, progress=progress)


@pytest.mark.parametrize("num_bits", [None, 4])
def test_the_merged_target_computes_what_was_trained(tiny, tmp_path, num_bits, monkeypatch):
    config = SPARSE.model_copy(update={"router_bits": num_bits})
    learner = learner_of(tiny, config, spread=30.0).eval()
    monkeypatch.setattr("moray.distill.sparse.merge.ChatTokenizer", NoTokenizer)
    write_sparse_target(tmp_path / "sparse", tiny.config, config, learner)
    target = Target.load(TargetConfig(model=str(tmp_path / "sparse"), device="cpu"))
    assert isinstance(target, SparseTarget)
    tokens = tiny.prompt(0, 40)
    batch = batch_of(tiny.target, [tokens], 6, learner.needs)
    with torch.no_grad():
        trained = learner(batch, view_of(batch)).predictions[0].hidden[0]
    found = target.forward(torch.tensor([tokens]), torch.arange(40)[None], None, KVRecorder(target, ()))
    assert found.routes is not None
    assert 0.3 < found.routes[1:].float().mean() < 0.95
    torch.testing.assert_close(found.last[0], trained, atol=2e-4, rtol=0)


@pytest.mark.parametrize("num_bits", [None, 4])
def test_routers_are_shifted_until_the_share_is_met(tiny, tmp_path, num_bits, monkeypatch):
    """As trained, the routers of this target run most layers; calibrated on some chats, others get the share too."""
    config = SPARSE.model_copy(update={"router_bits": num_bits, "share": 0.5})
    learner = learner_of(tiny, config, spread=30.0).eval()
    monkeypatch.setattr("moray.distill.sparse.merge.ChatTokenizer", NoTokenizer)
    chats = [tiny.prompt(seed, 60) for seed in range(12)]
    for name, own in (("trained", ()), ("calibrated", chats[:8])):
        write_sparse_target(tmp_path / name, tiny.config, config, learner, own)
    trained, calibrated = (
        Target.load(TargetConfig(model=str(tmp_path / name), device="cpu")) for name in ("trained", "calibrated")
    )
    assert isinstance(trained, SparseTarget)
    assert isinstance(calibrated, SparseTarget)
    off, shifted = (abs(measure_share(target, chats[8:]) - 0.5) for target in (trained, calibrated))
    assert shifted < off > 0.1, "on other chats too, which differ much for these random weights"
    assert measure_share(calibrated, chats[:8]) == pytest.approx(0.5, abs=0.01)
    shifts = {float((calibrated.routers[n].outer.bias - router.outer.bias)[1]) for n, router in trained.routers.items()}
    assert max(shifts) - min(shifts) < 1e-5, "all by the same constant"
    for n, router in trained.routers.items():
        assert torch.equal(router.outer.weight, calibrated.routers[n].outer.weight)


class NoTokenizer:
    """The tiny targets have none."""

    tokenizer: "NoTokenizer"

    @classmethod
    def load(cls, *_: object) -> "NoTokenizer":
        return cls()

    def save_pretrained(self, folder: str) -> None:
        assert Path(folder).is_dir()


NoTokenizer.tokenizer = NoTokenizer()


def test_skipped_tokens_are_hidden_by_a_factor():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    runs = (torch.rand(2, 9) < 0.6).float()
    runs[:, :2] = 1
    found = attend_evicted(query, key, value, runs, 8**-0.5)
    mask = torch.ones(9, 9, dtype=torch.bool).tril() & runs.bool()[:, None, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    runs.requires_grad_()
    attend_evicted(query, key, value, runs, 8**-0.5).sum().backward()
    assert (runs.grad[:, :8] != 0).all(), "a skipped token has a gradient too"


def test_the_share_loss_is_the_published_one(tiny):
    config = SPARSE.model_copy(update={"share": 0.5, "lora_rank": 0})
    learner = learner_of(tiny, config).eval()
    for router in learner.routers.values():
        router.outer.bias.data[1] += 1000  # every token runs through every layer
    batch = batch_of(tiny.target, [tiny.prompt(0, 12), tiny.prompt(1, 9)], 4, learner.needs)
    positions = 12 - 4 + 9 - 4
    with torch.no_grad():
        for progress, weight in ((1.0, 5.0), (0.5, 3.5355), (0.0, 0.0)):
            penalty = learner(batch, view_of(batch, progress)).penalty
            assert float(penalty) == pytest.approx(positions * weight * 0.5, abs=1e-3)
    assert math.isclose(5 * math.sin(math.pi / 4), 3.5355, abs_tol=1e-4)


def test_the_share_loss_of_a_batch_depends_only_on_the_mean(tiny):
    """If half of the tokens are above the share and half are below it by as much, the loss is 0."""
    shares = torch.tensor([[1.0, 1.0, 0.9, 0.3], [1.0, 1.0, 0.3, 0.9]])
    batch = batch_of(tiny.target, [tiny.prompt(0, 4), tiny.prompt(1, 4)], 2, learner_of(tiny).needs)
    always = torch.arange(4).expand(2, -1) < 2
    found = {}
    for kind in ("token", "batch"):
        learner = learner_of(tiny, SPARSE.model_copy(update={"share_per": kind}))
        found[kind] = float(learner._share_loss(shares, batch, always, view_of(batch)))
    assert found["batch"] == pytest.approx(0, abs=1e-5)
    assert found["token"] == pytest.approx(5.0 * 0.3 * 4, abs=1e-5)


def test_a_target_in_bfloat16_trains_without_autocast(tiny):
    narrow = tiny.config.model_copy(update={"dtype": "bfloat16"})
    learner = SparseLearner(SPARSE, TargetHead.load(narrow, tiny.target.spec.num_layers)).train()
    batch = batch_of(tiny.target, [tiny.prompt(0, 12)], 4, learner.needs)
    learner(batch, view_of(batch)).predictions[0].hidden.sum().backward()
    assert all(change.down.grad is not None for one in learner.changes for change in one)


def test_gumbel_noise_is_zero_after_its_decay(tiny):
    config = SPARSE.model_copy(update={"noise_decay_share": 0.5, "lora_dropout": 0.0})
    learner = learner_of(tiny, config, spread=1.0)
    batch = batch_of(tiny.target, [tiny.prompt(0, 40), tiny.prompt(1, 40)], 4, learner.needs)
    with torch.no_grad():
        decoded = learner.eval()(batch, view_of(batch)).predictions[0].hidden
        found = {
            progress: learner.train()(batch, view_of(batch, progress)).predictions[0].hidden
            for progress in (0.0, 0.25, 0.5, 1.0)
        }
    assert not torch.equal(found[0.0], decoded)
    assert not torch.equal(found[0.25], decoded)
    assert not torch.equal(found[0.25], found[0.0]), "it falls bit by bit"
    assert torch.equal(found[0.5], decoded), "from here on training takes the decisions of decoding"
    assert torch.equal(found[1.0], decoded)


def test_training_reaches_the_share_and_stays_near_the_dense_target(tiny, tmp_path, monkeypatch):
    learner = learner_of(tiny)
    text = tiny.hugging_face(tiny.prompt(), 40)
    batch = batch_of(tiny.target, [text, tiny.prompt(3, 40)], 4, learner.needs)
    steps = 60
    optimiser = Optimiser(
        learner, AdamWConfig(type="adamw", lr=2e-2), LinearSchedule(type="linear", warmup_steps=5, min_lr_ratio=0.1)
    )
    losses, config = LossConfig(feature=0.0, kl=1.0), TrainConfig(logging_steps=10, save_steps=steps)
    figures: list[dict[str, float]] = []
    train(
        Replicas(learner, optimiser, losses, config),
        ([as_data_shard(batch)] for _ in range(steps)),
        Span(first=Progress(), total_steps=steps, steps_per_epoch=steps, epochs=1),
        losses,
        config,
        lambda _, metrics: figures.append(metrics),
        lambda _: None,
    )
    assert figures[-1]["kl"] < figures[0]["kl"] or figures[-1]["kl"] < 0.5
    monkeypatch.setattr("moray.distill.sparse.merge.ChatTokenizer", NoTokenizer)
    write_sparse_target(tmp_path / "sparse", tiny.config, SPARSE, learner)
    target = Target.load(TargetConfig(model=str(tmp_path / "sparse"), device="cpu"))
    tokens = torch.tensor([text, tiny.prompt(3, 40)])
    found = target.forward(tokens, torch.arange(40).expand(2, -1), None, KVRecorder(target, ()))
    assert found.routes is not None
    assert float(found.routes.float().mean()) == pytest.approx(0.6, abs=0.2), "on what it was trained on; 0.9 at first"


def test_a_share_below_the_layers_without_routers_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"sparse.share is 0.5, but 3 of 4 layers have no router"):
        learner_of(tiny, SPARSE.model_copy(update={"first_layer": 3, "share": 0.5}))


def test_a_baseline_drops_layers_for_good(tiny, tmp_path, monkeypatch):
    config = SPARSE.model_copy(update={"has_routers": False, "dropped_layers": (2,)})
    learner = learner_of(tiny, config, spread=1.0).eval()
    monkeypatch.setattr("moray.distill.sparse.merge.ChatTokenizer", NoTokenizer)
    write_sparse_target(tmp_path / "dropped", tiny.config, config, learner)
    target = Target.load(TargetConfig(model=str(tmp_path / "dropped"), device="cpu"))
    assert target.spec.num_layers == 3
    assert target.spec.routing is None
    tokens = tiny.prompt(0, 20)
    batch = batch_of(tiny.target, [tokens], 6, learner.needs)
    with torch.no_grad():
        trained = learner(batch, view_of(batch)).predictions[0].hidden[0]
    cache = target.new_cache(MAX_POSITIONS)
    found = target.forward(torch.tensor([tokens]), torch.arange(20)[None], None, cache)
    torch.testing.assert_close(found.last[0], trained, atol=2e-4, rtol=0)


def test_settings_that_train_nothing_or_save_nothing_whole_are_refused(tiny):
    for problem, more in (
        ("give has_routers=false too", {"dropped_layers": [1]}),
        ("there is nothing to train", {"has_routers": False, "lora_rank": 0}),
    ):
        with pytest.raises(ConfigError, match=problem):
            validate(SparseConfig, more)
    with pytest.raises(ConfigError, match=r"dropped_layers has 7; the target's layers are 0 to 3"):
        learner_of(tiny, validate(SparseConfig, {"has_routers": False, "dropped_layers": [7], "first_layer": 1}))
    run = {"target": {"model": "t"}, "activations": "a", "output": "o", "optim": {"type": "adamw"}}
    published = {"losses": {"feature": 0, "kl": 0}, "sparse": {"ce_weight": 1}}
    assert validate(SparsifyConfig, run | published).sparse.ce_weight == 1
    with pytest.raises(ConfigError, match=r"sparse.ce_weight are all 0"):
        validate(SparsifyConfig, run | {"losses": {"feature": 0, "kl": 0}})


def test_dropout_follows_the_view_s_seed_and_is_the_same_where_activations_are_recomputed(tiny):
    """So a resumed run repeats an unbroken one, and activation checkpointing changes no gradient."""
    learner = learner_of(tiny, SPARSE.model_copy(update={"lora_dropout": 0.3}), spread=3.0).train()
    batch = batch_of(tiny.target, [tiny.prompt(0, 40), tiny.prompt(1, 31)], 5, learner.needs)
    start = torch.zeros_like(batch.tokens)

    def gradients(seed: int, *, recomputes: bool = False) -> list[torch.Tensor]:
        learner.recomputes = recomputes
        learner.zero_grad()
        torch.rand(1)  # the process's own random numbers go on
        view = DraftView(start, torch.zeros(2, dtype=torch.bool), seed=seed)
        learner(batch, view).predictions[0].hidden.float().square().sum().backward()
        return [parameter.grad.clone() for parameter in learner.parameters() if parameter.grad is not None]

    first = gradients(1)
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(1), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(1, recomputes=True), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, gradients(2), strict=True))
