"""Mixture of Attentions for several N of Target Layer Inference at once (arXiv 2410.03804, section 3.3; that N might
change while decoding is left to future work there).

    all N     embedding --SA--> x;  memory of verified tokens, keys and values of the target's last max(N) layers
    one N     x + shift[N] --CA over memory--> * gain[N] --> hidden[-1-N] in units of its rms --last N target layers-->

Training draws N per sequence. What a drafting state holds depends on no N, so each cycle may have another one at no
cost. Of its own an N has 2 E numbers: `shift` tells cross-attention which depth to predict, `gain` weighs the
directions of the residual stream, which all depths share, as that depth does.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moray.batch import TrainBatch
from moray.drafters.base import DraftOutput, DraftView, Feature
from moray.drafters.configs import DynamicMoAConfig
from moray.drafters.moa import MoA, MoAState
from moray.targets.head import TargetHead


class DynamicMoA(MoA):
    """One drafter whose effort is N; rows of `shift`, `gain`, `feature_scale` go by its place in `config.efforts`."""

    def __init__(self, config: DynamicMoAConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        shape = (len(config.efforts), 1, self.spec.hidden_size)  # three dimensions: these are no matrices to Muon
        self.shift = nn.Parameter(torch.zeros(shape))
        self.gain = nn.Parameter(torch.ones(shape))
        self.register_buffer("feature_scale", torch.ones(len(config.efforts), 1, 1))

    def set_scale(self, hidden_rms: Mapping[int, float]) -> None:
        for place, effort in enumerate(self.config.efforts):
            self.feature_scale[place] = hidden_rms[-1 - effort] if effort else 1.0

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        assert batch.taps.kv is not None
        device = batch.tokens.device
        efforts = view.efforts or (self.efforts[0],) * batch.tokens.shape[0]
        places = _on(device, [self.config.efforts.index(effort) for effort in efforts])
        feature = self._predict(batch, view, self.shift[places]) * (self.gain * self.feature_scale)[places]
        last = feature
        features = {}
        for place, effort in enumerate(self.config.efforts):
            rows = [row for row, drawn in enumerate(efforts) if drawn == effort]
            if effort and rows:
                index = _on(device, rows)
                kv = batch.taps.kv[:, :, -effort:].index_select(0, index)
                through = self._last_layers_in_one_pass(feature[index], kv, view.start[index])
                last = last.index_copy(0, index, through.to(last.dtype))
                weight = _on(device, [0.5 * (drawn == effort) for drawn in efforts])
                features[-1 - effort] = Feature(feature, self.feature_scale[place, 0, 0], weight)
        weight = _on(device, [0.5 if drawn else 1.0 for drawn in efforts])
        return self._output(last, view, features | {-1: Feature(last, 1.0, weight)})

    def set_effort(self, state: MoAState, effort: int) -> None:
        state.effort = effort

    def _query(self, x: Float[Tensor, "1 rows hidden"], state: MoAState) -> Float[Tensor, "1 rows hidden"]:
        return x + self.shift[self.config.efforts.index(state.effort)]

    def _feature(self, predicted: Float[Tensor, "1 rows hidden"], state: MoAState) -> Float[Tensor, "1 rows hidden"]:
        place = self.config.efforts.index(state.effort)
        return predicted * (self.gain[place] * self.feature_scale[place]).to(predicted.dtype)


def _on(device: torch.device, values: list[int] | list[float]) -> Tensor:
    """Row by row; a GPU takes them without being waited for."""
    return torch.tensor(values).to(device, non_blocking=True)
