"""What the tests of the application on Ray Serve share: one that runs, and the texts that it has to give."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served_app import NUM_QUESTIONS, ServedApp, plain_texts, questions


@pytest.fixture(scope="session")
def expected(tiny_target: Path) -> list[str]:
    """The target's own answers to the first `NUM_QUESTIONS` questions."""
    return plain_texts(tiny_target, questions(NUM_QUESTIONS))


@pytest.fixture(scope="module")
def app(ray_session: None, tiny_target: Path) -> Iterator[ServedApp]:
    """One of each deployment, until the module ends."""
    app = ServedApp(tiny_target, {})
    yield app
    app.close()
