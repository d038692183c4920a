"""Runs what a replica computes before it serves, such as loading its models, in a thread that then ends.

On a CPU, torch runs its loops on OpenMP. GNU's OpenMP keeps a team of workers for every thread that has ever run such a
loop. As soon as all teams together have more threads than the machine has cores, workers stop spinning between two
loops and sleep instead, and a target pass of several hundred short loops takes twice as long. Serve constructs a
replica in one thread, and the replica computes in another one: the first thread's team would slow the second one's down
for good. A team ends with its thread.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_in_ending_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a new thread, wait until that thread has ended, and return or raise what the function did."""
    with ThreadPoolExecutor(1, "loading") as threads:
        return threads.submit(function).result()
