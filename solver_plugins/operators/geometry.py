"""Stride, padding, dilation and groups of a layer in one normal form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from solver_plugins.errors import OptionError, ShapeError, did_you_mean

PADDING_MODES = ("zeros", "circular", "reflect", "replicate")

Padding = tuple[tuple[int, int], ...]


class ConvSizes(NamedTuple):
    """How a convolution runs on inputs of one size.

    Attributes:
        by_hand: Padding to be done before it: the (negative) dimension, and how much to the left and right of it.
        own: The (symmetric, zero) padding that the convolution does itself.
        output_size: The spatial size of its output.
        remainder: What a stride that does not divide the padded size leaves over: no output depends on it.
    """

    by_hand: tuple[tuple[int, int, int], ...]
    own: tuple[int, ...]
    output_size: tuple[int, ...]
    remainder: tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """The spatial arguments of a convolution; tuples have one entry per spatial dimension, and none for a Linear.

    ``padding`` has explicit ``(left, right)`` amounts, or is ``"same_dynamic"``: TensorFlow's SAME, whose total depends
    on the input size, ``max((ceil(n/s) - 1) s + d (k - 1) + 1 - n, 0)``; the left side gets the smaller half.
    ``padding_mode`` is "zeros", "circular", "reflect" or "replicate".
    """

    stride: tuple[int, ...] = ()
    padding: Padding | Literal["same_dynamic"] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: str = "zeros"

    def __post_init__(self) -> None:
        sides = len(self.stride) if self.padding == "same_dynamic" else len(self.padding)
        if not len(self.stride) == len(self.dilation) == sides:
            raise OptionError(
                "Expected stride, padding and dilation for the same number of dimensions; "
                f"found {self.stride}, {self.padding} and {self.dilation}."
            )
        if any(value < 1 for value in (*self.stride, *self.dilation, self.groups)):
            raise OptionError(
                "Expected stride, dilation and groups of at least 1; "
                f"found {self.stride}, {self.dilation} and {self.groups}."
            )
        if self.padding != "same_dynamic" and any(side < 0 for pair in self.padding for side in pair):
            raise OptionError(f"Expected padding of at least 0; found {self.padding}.")
        if self.padding_mode not in PADDING_MODES:
            raise OptionError(
                f"Unknown padding_mode {self.padding_mode!r}.{did_you_mean(str(self.padding_mode), PADDING_MODES)}"
            )
        if self.padding == "same_dynamic" and self.padding_mode != "zeros":
            raise OptionError(f"'same_dynamic' pads with zeros; found padding_mode {self.padding_mode!r}.")

    @classmethod
    def for_conv(
        cls,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        *,
        dims: int | None = None,
    ) -> "Geometry":
        """Normalises the arguments of ``torch.nn.Conv*d``; an OptionError says what does not fit.

        Padding "same" is ``d (k - 1)`` in total, with the smaller half on the left. ``dims`` is the number of spatial
        dimensions; by default the length of ``kernel_size``, and one if that is a single number.
        """
        dims = dims if dims is not None else (1 if isinstance(kernel_size, int) else len(kernel_size))
        kernel = _per_dimension("kernel_size", kernel_size, dims)
        steps = _per_dimension("stride", stride, dims)
        gaps = _per_dimension("dilation", dilation, dims)
        if any(taps < 1 for taps in kernel):
            raise OptionError(f"Expected kernel_size of at least 1; found {kernel}.")
        pairs: Padding
        if isinstance(padding, str):
            if padding not in ("same", "valid"):
                raise OptionError(f"Unknown padding {padding!r}.{did_you_mean(padding, ('same', 'valid'))}")
            if padding == "same" and any(step != 1 for step in steps):
                raise OptionError(f"padding='same' needs stride 1; found {steps}.")
            totals = [gap * (taps - 1) if padding == "same" else 0 for gap, taps in zip(gaps, kernel, strict=True)]
            pairs = tuple((total // 2, total - total // 2) for total in totals)
        else:
            pairs = tuple((side, side) for side in _per_dimension("padding", padding, dims))
        return cls(steps, pairs, gaps, groups, padding_mode)

    @property
    def dims(self) -> int:
        """The number of spatial dimensions; 0 for a Linear."""
        return len(self.stride)

    def padding_for(self, kernel_size: Sequence[int], input_size: Sequence[int] | None = None) -> Padding:
        """Returns the ``(left, right)`` amounts for inputs of one size; only "same_dynamic" needs the size."""
        if self.padding != "same_dynamic":
            return self.padding
        if input_size is None:
            raise OptionError("Dynamic 'same' padding depends on the input; pass input_size.")
        pairs = []
        for n, k, s, d in zip(input_size, kernel_size, self.stride, self.dilation, strict=True):
            total = max(((n + s - 1) // s - 1) * s + d * (k - 1) + 1 - n, 0)
            pairs.append((total // 2, total - total // 2))
        return tuple(pairs)

    def output_size(self, kernel_size: Sequence[int], input_size: Sequence[int]) -> tuple[int, ...]:
        """Returns the spatial size of the output.

        Raises:
            ShapeError: If the input is too small for the kernel, or for its own padding.
        """
        if not len(input_size) == len(kernel_size) == self.dims:
            raise ShapeError(f"Expected {self.dims} spatial dimensions; found input size {tuple(input_size)}.")
        sizes = []
        pads = self.padding_for(kernel_size, input_size)
        for n, k, s, d, (left, right) in zip(input_size, kernel_size, self.stride, self.dilation, pads, strict=True):
            room = n + left + right - d * (k - 1) - 1
            if n < 1 or room < 0:
                raise ShapeError(
                    f"Expected an input of at least {max(1, n - room)} for kernel {k}, dilation {d} and "
                    f"padding {(left, right)}; found size {n}."
                )
            least = {"circular": max(left, right), "reflect": max(left, right) + 1}.get(self.padding_mode, 1)
            if n < least and left + right > 0:
                raise ShapeError(
                    f"Expected an input of at least {least} for {self.padding_mode} padding "
                    f"{(left, right)}; found size {n}."
                )
            sizes.append(room // s + 1)
        return tuple(sizes)

    def sizes(self, kernel_size: tuple[int, ...], input_size: tuple[int, ...]) -> ConvSizes:
        """Returns how the convolution runs on inputs of one size; errors as in :meth:`output_size`."""
        outputs, pads = self.output_size(kernel_size, input_size), self.padding_for(kernel_size, input_size)
        remainder = tuple(
            n + left + right - (d * (k - 1) + 1) - (out - 1) * s
            for n, (left, right), k, d, s, out in zip(
                input_size, pads, kernel_size, self.dilation, self.stride, outputs, strict=True
            )
        )
        if self.padding_mode == "zeros" and all(left == right for left, right in pads):
            return ConvSizes((), tuple(left for left, _ in pads), outputs, remainder)
        by_hand = tuple((axis - self.dims, left, right) for axis, (left, right) in enumerate(pads) if left or right)
        return ConvSizes(by_hand, (0,) * self.dims, outputs, remainder)

    def reduced_stride(self) -> tuple[int, ...]:
        """Returns ``s / gcd(s, d)``: the stride of the undilated convolution with the same norm on an infinite lattice.

        Output ``o`` reads ``x[o s + j d]``. With ``c = gcd(s, d)`` only every c-th input is read, so divide both by
        ``c`` and call them ``s, d`` again. Taps ``j = s t + r`` then read ``x_r[o + d t]`` with
        ``x_r[m] = x[s m + r d]``. As ``gcd(s, d) = 1``, the sequences ``x_0 .. x_{s-1}`` split the input into disjoint
        parts, and the symbol is that of the undilated kernel at the frequency ``d w``: it has the same supremum.
        """
        return tuple(s // _gcd(s, d) for s, d in zip(self.stride, self.dilation, strict=True))


def _per_dimension(name: str, value: int | Iterable[int], dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Iterable) else (value,) * dims
    if len(values) == 1:
        values = values * dims
    if len(values) != dims or not all(isinstance(entry, int) for entry in values):
        raise OptionError(f"Expected {name} to be a whole number or {dims} of them; found {value!r}.")
    return values


def _gcd(a: int, b: int) -> int:
    # math.gcd cannot be traced if a compiler has made sizes symbolic.
    while b:
        a, b = b, a % b
    return a
