"""Mixture of Attentions for several N of Target Layer Inference at once (arXiv 2410.03804, section 3.3; that N might
change while decoding is left to future work there).

    all N     embedding --SA--> x;  memory of verified tokens, keys and values of the target's last max(N) layers
    one N     x + shift[N] --CA over memory--> to_depth[N] --> hidden[-1-N], in units of its rms --last N layers-->

Training draws N per sequence. What a drafting state holds depends on no N, so each cycle may have another one at no
cost. Of its own an N has E + E * E numbers: `shift` tells cross-attention which depth to predict, and `to_depth`, which
begins as the identity, takes its output to that depth's directions. With a factor per direction in place of the map tau
is a little lower (platform/RESULTS.md).
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
    """One drafter whose effort is N; `shift`, `to_depth` and `feature_scale` go by its place in `config.efforts`."""

    def __init__(self, config: DynamicMoAConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        num, width = len(config.efforts), self.spec.hidden_size
        # Of three dimensions, so that Muon leaves both to AdamW: a step of it would be as large as the identity.
        self.shift = nn.Parameter(torch.zeros(num, 1, width))
        self.to_depth = nn.Parameter(torch.eye(width).repeat(num, 1, 1))
        self.register_buffer("feature_scale", torch.ones(num))

    def set_scale(self, hidden_rms: Mapping[int, float]) -> None:
        for place, effort in enumerate(self.config.efforts):
            self.feature_scale[place] = hidden_rms[-1 - effort] if effort else 1.0

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        assert batch.taps.kv is not None
        device = batch.tokens.device
        efforts = view.efforts or (self.efforts[0],) * batch.tokens.shape[0]
        places = _on(device, [self.config.efforts.index(effort) for effort in efforts])
        feature = last = self._predict(batch, view, self.shift[places])
        for place, effort in enumerate(self.config.efforts):
            rows = _on(device, [row for row, drawn in enumerate(efforts) if drawn == effort])
            if not rows.shape[0]:
                continue
            own = self._at_depth(feature.index_select(0, rows), place)
            feature = feature.index_copy(0, rows, own.to(feature.dtype))
            if effort:
                kv = batch.taps.kv[:, :, -effort:].index_select(0, rows)
                own = self._last_layers_in_one_pass(own, kv, view.start.index_select(0, rows))
            last = last.index_copy(0, rows, own.to(last.dtype))
        features = {-1: Feature(last, 1.0, _on(device, [0.5 if drawn else 1.0 for drawn in efforts]))}
        for place, effort in enumerate(self.config.efforts):
            if effort and effort in efforts:
                weight = _on(device, [0.5 * (drawn == effort) for drawn in efforts])
                features[-1 - effort] = Feature(feature, self.feature_scale[place], weight)
        return self._output(last, view, features)

    def _at_depth(self, predicted: Float[Tensor, "rows seq hidden"], place: int) -> Float[Tensor, "rows seq hidden"]:
        """What cross-attention gave, as the hidden state that an effort predicts."""
        return predicted @ self.to_depth[place] * self.feature_scale[place]

    def set_effort(self, state: MoAState, effort: int) -> None:
        state.effort = effort

    def _query(self, x: Float[Tensor, "1 rows hidden"], state: MoAState) -> Float[Tensor, "1 rows hidden"]:
        return x + self.shift[self.config.efforts.index(state.effort)]

    def _feature(self, predicted: Float[Tensor, "1 rows hidden"], state: MoAState) -> Float[Tensor, "1 rows hidden"]:
        return self._at_depth(predicted, self.config.efforts.index(state.effort))


def _on(device: torch.device, values: list[int] | list[float]) -> Tensor:
    """Row by row; a GPU takes them without being waited for."""
    return torch.tensor(values, dtype=None if values else torch.long).to(device, non_blocking=True)
