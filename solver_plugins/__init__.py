"""Turns layers of timm and Hugging Face models into optimisation solvers, and back.

```python
model = convert_model(model, solver="proxsg", iters=10, gate="channel")
...  # finetune
model = merge_model(model)
```
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from solver_plugins.blocks import (
    SolverBlock,
    SolverConv1d,
    SolverConv2d,
    SolverConv3d,
    SolverLinear,
    cache_gram,
    calibrate,
    effective_rate,
    gates_of,
    param_groups,
    refresh_steps,
    set_blend,
    set_eval_mode,
    set_iters,
    solver_conv1d,
    solver_conv2d,
    solver_conv3d,
    solver_linear,
)
from solver_plugins.integrations.hooks import register_with_libraries
from solver_plugins.operators import lipschitz_constant
from solver_plugins.prox import declare_activation, list_priors, prox_for
from solver_plugins.registry import list_solvers, register_solver, solver_info
from solver_plugins.surgery import (
    apply_conversion,
    conversion_of,
    convert_model,
    inspect_model,
    merge_model,
    revert_model,
    solver_report,
)

if TYPE_CHECKING:
    from solver_plugins.dropblock import (
        StructuredDropoutRegularizer,
        convert_dropout,
        inspect_dropout,
        revert_dropout,
    )
    from solver_plugins.equilibrium import DeepOptEq, OptEqLayer
    from solver_plugins.integrations import load, save
    from solver_plugins.integrations.export import export_model
    from solver_plugins.integrations.heads import attach_opteq_head, remove_opteq_head
    from solver_plugins.integrations.proxprop_callback import ProxPropCallback
    from solver_plugins.integrations.trainer import SolverCallback
    from solver_plugins.proxprop import ProxProp
    from solver_plugins.train.predict import predict

try:
    __version__ = version("solver-plugins")
except PackageNotFoundError:  # A source tree that was never installed.
    __version__ = "0.0.0"

__all__ = [
    "DeepOptEq",
    "OptEqLayer",
    "ProxProp",
    "ProxPropCallback",
    "SolverBlock",
    "SolverCallback",
    "SolverConv1d",
    "SolverConv2d",
    "SolverConv3d",
    "SolverLinear",
    "StructuredDropoutRegularizer",
    "apply_conversion",
    "attach_opteq_head",
    "cache_gram",
    "calibrate",
    "conversion_of",
    "convert_dropout",
    "convert_model",
    "declare_activation",
    "effective_rate",
    "export_model",
    "gates_of",
    "inspect_dropout",
    "inspect_model",
    "lipschitz_constant",
    "list_priors",
    "list_solvers",
    "load",
    "merge_model",
    "param_groups",
    "predict",
    "prox_for",
    "refresh_steps",
    "register_solver",
    "remove_opteq_head",
    "revert_dropout",
    "revert_model",
    "save",
    "set_blend",
    "set_eval_mode",
    "set_iters",
    "solver_conv1d",
    "solver_conv2d",
    "solver_conv3d",
    "solver_info",
    "solver_linear",
    "solver_report",
]


# What solver blocks do without is imported when it is asked for: a library such as transformers, or another package.
_LATER = {
    "DeepOptEq": "equilibrium",
    "OptEqLayer": "equilibrium",
    "ProxProp": "proxprop",
    "ProxPropCallback": "integrations.proxprop_callback",
    "SolverCallback": "integrations.trainer",
    "StructuredDropoutRegularizer": "dropblock",
    "attach_opteq_head": "integrations.heads",
    "convert_dropout": "dropblock",
    "export_model": "integrations.export",
    "inspect_dropout": "dropblock",
    "load": "integrations",
    "predict": "train.predict",
    "remove_opteq_head": "integrations.heads",
    "revert_dropout": "dropblock",
    "save": "integrations",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Costs nothing where neither timm nor transformers is used; see its module.
register_with_libraries()
