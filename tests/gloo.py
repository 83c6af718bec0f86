"""Two real processes over gloo, for tests of what is spread over processes."""

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _workers() -> dict[Path, list[str]]:
    """Returns state and counts of context switches of each of gloo's worker threads (none without a /proc)."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # A thread may end meanwhile.
            name, *rest = status.read_text().splitlines()
            if name.endswith("pt_gloo_runloop"):
                found[status] = [line for line in rest if line.startswith("State:") or "ctxt_switches:" in line]
    return found


def _rest(seconds: float = 30) -> None:
    """Waits until gloo's workers sleep, and have let go of the tensors that they were given.

    A worker says that a collective is done before it drops the collective's tensors, for which it needs the GIL. A
    thread that waits for the GIL when the interpreter's end begins is ended by ``pthread_exit``, here out of a
    destructor: "terminate called without an active exception" (pytorch/pytorch#190489; Python before 3.14). To destroy
    a group joins its workers, unless the group is still referred to, as by DTensor's caches or by a test. In the nap
    nobody holds the GIL, so that a worker that wants it runs (is counted) or could run (its state).
    """
    before: dict[Path, list[str]] = {}
    end = time.monotonic() + seconds
    while (now := _workers()) != before or any("S (sleeping)" not in lines[0] for lines in now.values()):
        if time.monotonic() > end:
            return
        before = now
        time.sleep(0.02)


def _work(rank: int, port: int, body: Callable[..., Any], args: tuple[Any, ...], queue: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        queue.put((rank, body(rank, *args), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    # Nobody leaves while the other still talks; after an error the other may never come.
    dist.destroy_process_group()
    queue.close()
    queue.join_thread()
    _rest()


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_two_processes(body: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs ``body(rank, *args)`` in two processes and returns both results.

    Raises:
        AssertionError: If one of them fails, with its traceback.
    """
    port = free_port()
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_work, args=(rank, port, body, args, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        results: dict[int, Any] = {}
        for _ in processes:
            rank, result, failure = queue.get(timeout=240)
            assert failure is None, f"process {rank}:\n{failure}"
            results[rank] = result
        for rank, process in enumerate(processes):
            process.join(60)
            assert process.exitcode == 0, f"process {rank} ended with {process.exitcode}"
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    return [results[0], results[1]]
