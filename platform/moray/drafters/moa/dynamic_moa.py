"""Mixture of Attentions for several N of Target Layer Inference at once (arXiv 2410.03804, section 3.3, which leaves
changing N while decoding to future work).

    all N     embedding --SA--> x;  memory of verified tokens, keys and values of the target's last max(N) layers
    one N     x + shift[N] --CA over memory--> to_depth[N] --> hidden[-1-N], in units of its rms --last N layers-->

Training draws N per sequence. The contents of a drafting state do not depend on N, so each cycle can use another N at
no cost. Each N has E + E * E parameters: `shift` tells cross-attention which depth to predict, and `to_depth`,
initialised to the identity, maps its output to the directions of that depth. A factor per direction instead of the map
gives a slightly lower tau (docs/results/sweeps.md).
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TrainBatch
from moray.drafters.common.rows import on_device
from moray.drafters.configs import DynamicMoAConfig
from moray.drafters.learner import DraftOutput, DraftView, Feature
from moray.drafters.moa.moa import MoA, MoAState
from moray.targets.head import TargetHead


class DynamicMoA(MoA):
    """One drafter for several N; `shift`, `to_depth` and `feature_scale` are indexed by the place of N in
    `config.layer_counts`."""

    def __init__(self, config: DynamicMoAConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        num, width = len(config.layer_counts), self.spec.hidden_size
        # Three dimensions, so that AdamW and not Muon trains both: a step of Muon would be as large as the identity.
        self.shift = nn.Parameter(torch.zeros(num, 1, width))
        self.to_depth = nn.Parameter(torch.eye(width).repeat(num, 1, 1))
        self.register_buffer("feature_scale", torch.ones(num))

    def set_scale(self, hidden_rms: Mapping[int, float]) -> None:
        for place, num_target_layers in enumerate(self.config.layer_counts):
            self.feature_scale[place] = hidden_rms[-1 - num_target_layers] if num_target_layers else 1.0

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        assert batch.taps.kv is not None
        device = batch.tokens.device
        layer_counts = view.layer_counts or (self.layer_counts[0],) * batch.tokens.shape[0]
        places = on_device(
            device, [self.config.layer_counts.index(num_target_layers) for num_target_layers in layer_counts]
        )
        feature = last = self._predict(batch, view, self.shift[places])
        for place, num_target_layers in enumerate(self.config.layer_counts):
            rows = on_device(device, [row for row, drawn in enumerate(layer_counts) if drawn == num_target_layers])
            if not rows.shape[0]:
                continue
            own = self._at_depth(feature.index_select(0, rows), place)
            feature = feature.index_copy(0, rows, own.to(feature.dtype))
            if num_target_layers:
                kv = batch.taps.kv[:, :, -num_target_layers:].index_select(0, rows)
                own = self._last_layers_in_one_pass(own, kv, view.start.index_select(0, rows))
            last = last.index_copy(0, rows, own.to(last.dtype))
        features = {-1: Feature(last, 1.0, on_device(device, [0.5 if drawn else 1.0 for drawn in layer_counts]))}
        for place, num_target_layers in enumerate(self.config.layer_counts):
            if num_target_layers and num_target_layers in layer_counts:
                weight = on_device(device, [0.5 * (drawn == num_target_layers) for drawn in layer_counts])
                features[-1 - num_target_layers] = Feature(feature, self.feature_scale[place], weight)
        return self._output(last, view, features)

    def _at_depth(self, predicted: Float[Tensor, "rows seq hidden"], place: int) -> Float[Tensor, "rows seq hidden"]:
        """Map the output of cross-attention to the hidden state that this N predicts."""
        return predicted @ self.to_depth[place] * self.feature_scale[place]

    def set_num_target_layers(self, state: MoAState, num_target_layers: int) -> None:
        state.num_target_layers = num_target_layers

    def score(
        self,
        states: Sequence[MoAState],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        groups: dict[int, list[int]] = {}
        for place, state in enumerate(states):
            groups.setdefault(state.num_target_layers, []).append(place)
        if len(groups) == 1:
            return super().score(states, tokens, ancestors, depth)
        found: dict[int, Tensor] = {}
        for places in groups.values():  # sequences with the same N go through the same layers
            index = on_device(tokens.device, places)
            sees = ancestors if ancestors is None or ancestors.shape[0] == 1 else ancestors[index]
            logits = super().score([states[place] for place in places], tokens[index], sees, depth)
            found |= zip(places, logits, strict=True)
        return torch.stack([found[place] for place in range(len(states))])

    def _query(self, x: Float[Tensor, "1 rows hidden"], num_target_layers: int) -> Float[Tensor, "1 rows hidden"]:
        return x + self.shift[self.config.layer_counts.index(num_target_layers)]

    def _feature(
        self, predicted: Float[Tensor, "1 rows hidden"], num_target_layers: int
    ) -> Float[Tensor, "1 rows hidden"]:
        return self._at_depth(predicted, self.config.layer_counts.index(num_target_layers))
