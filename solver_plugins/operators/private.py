"""What this package calls of torch that torch does not promise to keep.

A torch without one of these would fail in the middle of a backward pass, with an error that says nothing.
"""

from functools import reduce

import torch

PRIVATE = (
    "_C.DisableTorchFunction",
    "_C._TorchDispatchModeKey.FAKE",
    "_C._are_functorch_transforms_active",
    "_C._autograd._get_current_graph_task_keep_graph",
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._functorch.is_legacy_batchedtensor",
    "_C._get_dispatch_mode",
    "_C._get_function_stack_at",
    "_C._get_tracing_state",
    "_C._len_torch_function_stack",
    "_C._nn",
    "_C._will_engine_execute_node",
    "_assert_async",
    "_ops.OpOverload",
    "_subclasses.fake_tensor",
    "autograd.forward_ad._current_level",
    "utils.checkpoint.CheckpointFunction",
)
"""Names below ``torch``."""


def check_torch() -> None:
    """Raises ImportError if the installed torch lacks something that is needed."""
    missing = [name for name in PRIVATE if not _has(name)]
    if missing:
        raise ImportError(
            f"solver_plugins calls torch.{missing[0]}, which torch {torch.__version__} does not have. Install a torch "
            "that this version of solver_plugins was tested with (see its pyproject.toml), or a newer solver_plugins."
        )


def _has(name: str) -> bool:
    try:
        reduce(getattr, name.split("."), torch)
    except AttributeError:
        return False
    return True
