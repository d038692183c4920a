"""What the tests of the HTTP interface share: a tiny target that is served on this machine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny target."""
    from tiny_targets import save_chat_target

    return save_chat_target(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def serve_target(chat_target: Path) -> Callable[..., AbstractContextManager[Any]]:
    """Serve it with settings of its own (see `served_api.served`)."""
    from served_api import served

    return partial(served, chat_target)


@pytest.fixture(scope="session")
def running(serve_target: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """The interface with default settings."""
    with ExitStack() as stack:
        yield stack.enter_context(serve_target())


@pytest.fixture(scope="session")
def client(running: Any) -> OpenAI:
    """OpenAI's own."""
    return running.client()
