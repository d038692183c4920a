"""What a drafter and the target it is used with must have in common, checked field by field.

A drafter paired with another tokenizer, rotary embedding or set of taps still drafts, only badly. So such a pair is
rejected, and the error names the field and both values.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moray.batch import TapNeeds
from moray.drafters.base import Drafter
from moray.drafters.configs import DRAFTER_CONFIG, DrafterConfig
from moray.errors import DataError, MismatchError
from moray.targets.spec import TargetSpec
from moray.text import fingerprint_parts

FORMAT = 3

_TITLES = {
    "rope_theta": "RoPE theta (rope_theta)",
    "rope_scaling": "RoPE scaling (rope_scaling)",
    "fingerprint": "weights and config (fingerprint)",
}


@dataclass(frozen=True)
class Contract:
    """A drafter's configuration, and what it was trained for."""

    drafter: DrafterConfig
    target: TargetSpec
    text_fingerprint: str
    taps: TapNeeds

    @classmethod
    def of(cls, drafter: Drafter, text_fingerprint: str) -> "Contract":
        """The contract of a loaded drafter."""
        config: Any = drafter.config
        return cls(config, drafter.spec, text_fingerprint, drafter.needs)

    @classmethod
    def parse(cls, values: dict[str, Any], source: Path) -> "Contract":
        """Restore a contract from the JSON that `describe` produced.

        Raises:
            DataError: the format is another one.
            KeyError, ValidationError: the values are damaged.
        """
        if values["format"] != FORMAT:
            raise DataError(
                f"'{source}' has format {values['format']}, this version reads {FORMAT}; train the drafter again"
            )
        taps = values["taps"]
        return cls(
            DRAFTER_CONFIG.validate_json(json.dumps(values["drafter"])),
            TargetSpec.model_validate_json(json.dumps(values["target"])),
            values["text_fingerprint"],
            TapNeeds(tuple(taps["kv_layers"]), tuple(taps["hidden_depths"])),
        )

    def describe(self) -> dict[str, Any]:
        """The contract as JSON values."""
        config: Any = self.drafter
        return {
            "format": FORMAT,
            "drafter": DRAFTER_CONFIG.dump_python(config, mode="json"),
            "target": self.target.model_dump(mode="json"),
            "text_fingerprint": self.text_fingerprint,
            "taps": {"kv_layers": list(self.taps.kv_layers), "hidden_depths": list(self.taps.hidden_depths)},
        }

    def check_target(self, folder: Path, spec: TargetSpec, text_fingerprint: str) -> None:
        """Reject another target, tokenizer or chat template.

        Raises:
            MismatchError: names the first field that differs and both values.
        """
        both = f"trained for fingerprint {self.target.fingerprint}, this target's is {spec.fingerprint}"
        ours = spec.model_dump()
        for name, value in self._target_fields():
            if value != ours[name]:
                _refuse(folder, f"target, whose {_TITLES.get(name, name)} differs", value, ours[name], both)
        given = fingerprint_parts(text_fingerprint)
        for name, value in fingerprint_parts(self.text_fingerprint).items():
            if value != given[name]:
                _refuse(folder, f"{name}, whose fingerprint differs", value, given[name])

    def check_taps(self, folder: Path, needs: TapNeeds) -> None:
        """Reject a drafter that would read other taps than it was trained on.

        Raises:
            MismatchError: names both.
        """
        for title, ours, theirs in (
            ("taps, whose layers of keys and values (kv_layers) differ", self.taps.kv_layers, needs.kv_layers),
            ("taps, whose hidden states (hidden_depths) differ", self.taps.hidden_depths, needs.hidden_depths),
        ):
            if ours != theirs:
                _refuse(folder, title, list(ours), list(theirs))

    def _target_fields(self) -> Iterator[tuple[str, Any]]:
        """The fields of the target with the fingerprint last: sizes say more than it does, and it differs with each of
        them."""
        values = self.target.model_dump()
        last = values.pop("fingerprint")
        yield from values.items()
        yield "fingerprint", last


def _refuse(folder: Path, what: str, trained: Any, given: Any, more: str = "") -> None:
    noun = what.partition(",")[0]
    raise MismatchError(
        f"drafter '{folder}' was trained for another {what}: {trained} in training, {given} here"
        f"{f' ({more})' if more else ''}; train a drafter for this {noun} or point `target` at the right one"
    )
