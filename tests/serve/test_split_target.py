"""A target over two processes over HTTP: greedy text is that of one process, and a lost rank fails the replica."""

import os
import signal

import pytest
from served_api import MODEL, served

from moray.errors import RankError
from moray.targets.parallel.target import ParallelTarget

MESSAGES = [{"role": "user", "content": "ab ab ab ab"}]


def _answer(app) -> str:
    client = app.client()
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0)
    return answer.choices[0].message.content


def test_served_text_is_that_of_one_process_and_a_lost_rank_fails_the_replica(chat_target):
    drafters = {"lookup": {"type": "ngram"}}
    with served(chat_target, drafters=drafters) as app:
        text = _answer(app)
    with served(chat_target, drafters=drafters, tensor_parallel=2) as app:
        assert _answer(app) == text
        target = app.engine.target
        assert isinstance(target, ParallelTarget)
        app.replica.check_health()
        os.kill(target.followers.pids[0], signal.SIGKILL)
        target.followers.wait()
        with pytest.raises(RankError, match="rank 1 of 2 has ended with exit code -9"):
            app.replica.check_health()
