"""What a trial's folder holds: the JSON of trial.json and rungs.json. Torch-free.

The keys are those on disk, where files of earlier versions may lack some.
"""

from typing import Literal, NotRequired, TypedDict

from sweeps.tuning.spaces import Choices

State = Literal["running", "stopped", "finished", "diverged", "failed"]
"""`stopped` by the scheduler; `finished` on the last rung; `diverged` if a loss or gradient is not finite; `failed` if
processes died too often or an error ended the trial. Failed trials are retried when the sweep is resumed."""


class TrialRecord(TypedDict):
    """The contents of trial.json."""

    choices: Choices
    begun: float
    """Time of the first start, in seconds since 1970."""
    state: State
    message: str | None
    drawn: NotRequired[Choices]
    """The searcher's proposal, if it differs from the choices."""


class Figures(TypedDict, total=False):
    """The figures of one drafter and tree. A figure is None if it is undefined, and absent from files that were written
    before it existed."""

    tau: float | None
    tau_spread: list[float] | None
    speedup: float | None
    speedup_spread: list[float] | None
    tokens_per_second: float | None
    draft_steps: float | None
    draft_cost: float | None
    verify_cost: float | None
    efficiency: float | None
    lossless: bool | None
    """None if the text need not equal plain decoding's."""
    num_prompts: int
    num_tokens: int
    equal_share: float | None
    """Share of answers that equal plain decoding's; only with a batch size above 1."""


class MeasuredFigures(Figures):
    """Figures with the answers that they summarise."""

    answers: list[list[float]]
    """Per prompt, as `Answer.row` lists them."""


class SparseFigures(TypedDict):
    """A sparse target beside the dense one; only in sweeps over sparse targets."""

    perplexity: float
    dense_perplexity: float
    agreement: float
    """Share of the positions at which the likeliest token is the dense target's."""
    share: float
    """Mean share of the layers that a token runs through."""
    pass_share: float
    """Mean share of the layers that a pass over eight tokens in a row reads."""


class RungFigures(Figures, total=False):
    """Figures on a rung, and what trial and training have spent to reach it."""

    rung_tokens: int
    """Training tokens that the rung asks for; like `step` and `simulated_tau`, only in sweeps of drafters."""
    step: int
    training_tokens: int
    training_seconds: float
    loss: float | None
    simulated_tau: float | None
    break_even_tau: float
    """Tau at which drafts would pay; only in sweeps that stop trials by it."""
    seconds: float
    rung_questions: int
    """Questions that the rung asks; only in sweeps over decoding choices."""


class TrialRow(RungFigures):
    """The measurement of one rung, as in rungs.json."""

    rung: int
    objective: float
    answers: list[list[float]]


class LastFigures(RungFigures, total=False):
    """The same as a trial's last row; empty for a trial that was never measured, and without answers in a summary."""

    rung: int
    objective: float
    answers: list[list[float]]
