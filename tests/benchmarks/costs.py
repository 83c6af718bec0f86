"""Times and memory of calls that are compared with each other."""

import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile


def best_times(
    calls: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Returns the shortest time of each call; they take turns, so that a slow moment hits all, after one warm-up."""
    best = dict.fromkeys(calls, math.inf)
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = clock()
            call()
            seconds = clock() - start
            best[name] = min(best[name], seconds) if turn else math.inf
    return best


def peak_bytes(call: Callable[[], Any]) -> int:
    """Returns how many bytes of tensors a call holds at most beyond what was there before it."""
    records = partial(profile, activities=[ProfilerActivity.CPU], profile_memory=True)
    with records():  # The first profile of a process starts late, and misses the first events.
        pass
    # What is collected meanwhile would count as given back by the call.
    gc.collect()
    gc.disable()
    try:
        with records() as found:
            call()
    finally:
        gc.enable()
    held = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
