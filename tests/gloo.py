"""Two real processes over gloo, for tests of what is spread over processes."""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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
    # All is said. A process was once aborted after this point, at the interpreter's end ("terminate called without an
    # active exception": a thread that outlived it). The cause is not known; what is tested is over by then.
    sys.stderr.flush()
    os._exit(0)


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
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    return [results[0], results[1]]
