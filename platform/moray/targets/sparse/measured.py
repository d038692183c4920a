"""What was measured of a sparse target, in `measured.json` beside its routers. No part of the target."""

from pathlib import Path

from pydantic import Field

from moray.config import Config
from moray.errors import ConfigError
from moray.explain import one_line

MEASURED = "measured.json"


class Measured(Config):
    """A sparse target beside the dense one that it comes from, on held-out chats (`pipelines.evaluate sparse`)."""

    fingerprint: str
    """Of the target."""
    share: float = Field(ge=0, le=1)
    """Mean share of the layers that a token runs through."""
    agreement: float = Field(ge=0, le=1)
    """Share of the response positions at which the likeliest token is the dense target's."""
    perplexity: float = Field(gt=0)
    """Of the responses."""
    dense_perplexity: float = Field(gt=0)
    """The same under the dense target."""
    num_tokens: int = Field(ge=1)
    """Response tokens."""

    @classmethod
    def read(cls, folder: Path, fingerprint: str) -> "Measured | None":
        """The figures of a target; None if it was not measured since it was written.

        Raises:
            ConfigError: the file is damaged.
        """
        path = folder / MEASURED
        if not path.is_file():
            return None
        try:
            found = cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"'{path}' cannot be used: {one_line(str(error))}; delete it") from None
        return found if found.fingerprint == fingerprint else None

    def save(self, folder: Path) -> None:
        """Write it beside a sparse target."""
        (folder / MEASURED).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
