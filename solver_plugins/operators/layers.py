"""Reads a layer as a kernel and a :class:`Geometry`, with a small declarative table.

Layers of other libraries are matched by the qualified names of their classes and base classes, so none is imported.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from solver_plugins.errors import UnsupportedLayerError
from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.operator import LinearOperator, operator_from_kernel
from solver_plugins.registry import Registry

Reader = Callable[[nn.Module], tuple[Tensor, Geometry]]
"""Returns the effective kernel ``[n2, n1/groups, *k]`` (a Linear: ``[n2, n1]``) and the geometry of a layer."""

LAYERS: Registry[Reader] = Registry("layer")

_MATRIX = Geometry()
"""The geometry of every matrix, made once because layers are read in each forward pass."""

SUPPORTED = (
    "torch.nn.Linear, torch.nn.Conv1d/Conv2d/Conv3d, timm's Conv2dSame and StdConv2d, transformers' Conv1D and "
    "WeightStandardizedConv2d, and subclasses of these that keep their forward"
)


def register_layer(layer_class: type[nn.Module] | str, reader: Reader) -> None:
    """Adds a layer class, or its qualified name ("package.module.Class"), with the subclasses that keep its forward.

    ``reader`` returns kernel and geometry; the layer must compute exactly that convolution plus a bias.
    DuplicateNameError if the class has a reader already.
    """
    name = layer_class if isinstance(layer_class, str) else _qualified_name(layer_class)
    LAYERS.register(name, reader)


def geometry_of(layer: nn.Module) -> Geometry:
    """Returns the geometry of a supported layer.

    Raises:
        UnsupportedLayerError: If the layer is not a convolution or Linear that the package can read.
    """
    return read_layer(layer)[1]


def kernel_of(layer: nn.Module) -> Tensor:
    """Returns the effective weight of a supported layer as a kernel ``[n2, n1/groups, *k]`` (Linear: ``[n2, n1]``).

    Raises:
        UnsupportedLayerError: If the layer is not a convolution or Linear that the package can read.
    """
    return read_layer(layer)[0]


@contextmanager
def at_rest(layer: nn.Module) -> Iterator[None]:
    """Context in which reading a parametrised weight does not change it.

    In training mode some parametrisations (spectral_norm) take a step whenever the weight is read.
    """
    moving = []
    if parametrize.is_parametrized(layer):
        inside: nn.ModuleDict = layer.parametrizations  # type: ignore[assignment]
        moving = [module for module in inside.modules() if module.training]
    for module in moving:
        module.training = False
    try:
        yield
    finally:
        for module in moving:
            module.training = True


def read_layer(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """Returns the kernel and geometry of a supported layer; raises like :func:`kernel_of`."""
    reader = reader_for(type(layer))
    with at_rest(layer):
        kernel, geometry = reader(layer)
    if isinstance(kernel, UninitializedParameter):
        raise UnsupportedLayerError(
            f"{type(layer).__qualname__} is a lazy layer whose weight has no shape yet; run one forward pass first."
        )
    if not kernel.numel():
        raise UnsupportedLayerError(
            f"Expected a layer with inputs and outputs; found a {type(layer).__qualname__} whose weight has the shape "
            f"{tuple(kernel.shape)}, so there is nothing to solve."
        )
    return kernel, geometry


def operator_for(layer: nn.Module, input_shape: Sequence[int], *, diagonal: Tensor | None = None) -> LinearOperator:
    """Returns the operator that a layer applies to inputs of one shape, with or without batch dimensions; no bias.

    ``diagonal`` is a scale per output feature (a folded norm).

    Raises:
        UnsupportedLayerError: If the layer cannot be read.
        ShapeError: If the shape does not fit the layer.
    """
    kernel, geometry = read_layer(layer)
    return operator_from_kernel(kernel, geometry, input_shape, diagonal)


def _inherited(layer_class: type, base: type) -> bool:
    # torch's convolutions compute in _conv_forward, which a subclass may replace without changing forward.
    return all(
        getattr(layer_class, name, None) is getattr(base, name, None)
        for name in ("forward", "_conv_forward", "__call__")
    )


def reader_for(layer_class: type) -> Reader:
    """Returns the reader of a layer class.

    Raises:
        UnsupportedLayerError: If there is none, with the reason.
    """
    own: Reader | None = getattr(layer_class, "kernel_reader", None)
    if own is not None:
        # A solver block overrides forward, and says itself how it is read.
        return own
    for base in layer_class.__mro__:
        name = _qualified_name(base)
        if name not in LAYERS:
            continue
        if _inherited(layer_class, base):
            return LAYERS.get(name)
        raise UnsupportedLayerError(
            f"{_qualified_name(layer_class)} is a {base.__name__} with its own forward, which may apply something else "
            f"than its weight (weight standardisation, quantisation, a cache). Expected {SUPPORTED}. "
            "If it convolves with some kernel, say which with solver_plugins.operators.register_layer."
        )
    transposed = " Transposed convolutions are not supported." if "ConvTranspose" in layer_class.__name__ else ""
    raise UnsupportedLayerError(
        f"Cannot read {_qualified_name(layer_class)} as a linear operator.{transposed} Expected {SUPPORTED}, "
        "or a class registered with solver_plugins.operators.register_layer."
    )


def _qualified_name(layer_class: type) -> str:
    return f"{layer_class.__module__}.{layer_class.__qualname__}"


def _read_linear(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """A matrix in torch's layout."""
    linear: nn.Linear = layer  # type: ignore[assignment]
    return linear.weight, _MATRIX


def _read_transposed(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """A matrix stored as ``[n1, n2]``."""
    linear: nn.Linear = layer  # type: ignore[assignment]
    return linear.weight.t(), _MATRIX


def _read_conv(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """A torch convolution."""
    conv: nn.Conv2d = layer  # type: ignore[assignment]
    known = vars(layer).get("geometry")
    if isinstance(known, Geometry):
        # A solver block is read in each forward pass, and knows its geometry.
        return conv.weight, known
    geometry = Geometry.for_conv(
        conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode
    )
    return conv.weight, geometry


def _read_conv_same(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """A convolution with TensorFlow's dynamic SAME padding; its own padding arguments are not used."""
    conv: nn.Conv2d = layer  # type: ignore[assignment]
    stride, dilation = tuple(conv.stride), tuple(conv.dilation)
    return conv.weight, Geometry(stride, "same_dynamic", dilation, conv.groups)


for _class in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_layer(_class, _read_linear if _class is nn.Linear else _read_conv)
register_layer("timm.layers.conv2d_same.Conv2dSame", _read_conv_same)
register_layer("transformers.pytorch_utils.Conv1D", _read_transposed)
# Both override forward, but compute the same product.
register_layer("timm.layers.linear.Linear", _read_linear)
register_layer("transformers.models.falcon.modeling_falcon.FalconLinear", _read_linear)
