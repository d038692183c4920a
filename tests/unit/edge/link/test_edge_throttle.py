"""A process that is made as slow as a device gets its share of one core, and all of it afterwards."""

import os
import subprocess
import sys

import pytest

from moray.edge.link.throttle import throttled, why_not
from moray.errors import ConfigError

_SPIN = """
import sys, time
for line in sys.stdin:
    begin, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - begin < 0.6:
        pass
    print((time.process_time() - cpu) / (time.monotonic() - begin), flush=True)
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_process_gets_its_share_of_a_core():
    with subprocess.Popen(
        [sys.executable, "-c", _SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def share() -> float:
            process.stdin.write("\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        with throttled(process.pid, 3.0):
            assert share() < 0.45
        process.stdin.close()
    with pytest.raises(ConfigError, match="compute_ratio is 50; 1 to 6"), throttled(os.getpid(), 50.0):
        pass
