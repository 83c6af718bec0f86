"""Feedforward networks as equilibria (Lemmas 1 and 2), with corrections of the printed proofs.

Both need factors ``W_l`` with ``W_{l+1} W_l^T = A_{l+1}``. Here the state has one block of coordinates per hidden
layer. With ``E_l`` the embedding of block ``l``,

    W_1 = E_1^T,    W_l = A_l E_{l-1}^T + E_l^T

so nothing has to be inverted. (Lemma 4 takes right inverses in the smaller space of the widest layer. Its factor must
have full rank, but only has it if ``A_l`` does.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.equilibrium.deep import DeepOptEq
from solver_plugins.equilibrium.layer import OptEqLayer
from solver_plugins.errors import OptionError
from solver_plugins.prox import prox_for
from solver_plugins.prox.activations import Activation

_FEWEST = 3


def universal_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns ``W_1, ..., W_{L+1}`` for the matrices ``A_2, ..., A_{L+1}`` behind the first hidden layer (Lemma 1).

    The network ``x_{l+1} = s(A_l x_l + c_l)``, ``y = A_{L+1} x_{L+1}`` is ``z_{l+1} = W_l^T s(W_l z_l + c_l)``, ``y =
    W_{L+1} z_{L+1}``: ``W_l z_l = A_l x_l`` in every layer.
    """
    widths = [matrix.shape[1] for matrix in weights]
    starts = [sum(widths[:index]) for index in range(len(widths))]
    made = []
    for index in range(len(widths) + 1):
        rows = widths[index] if index < len(widths) else weights[-1].shape[0]
        W = weights[0].new_zeros(rows, sum(widths))
        if index < len(widths):
            W[:, starts[index] : starts[index] + rows] = torch.eye(rows, dtype=W.dtype, device=W.device)
        if index > 0:
            W[:, starts[index - 1] : starts[index - 1] + widths[index - 1]] = weights[index - 1]
        made.append(W)
    return made


def deep_opteq_of(linears: Sequence[nn.Linear], activation: Activation = "relu") -> nn.Sequential:
    """Returns a :class:`DeepOptEq` and a linear layer that together compute the same as a network (Lemma 2).

    The printed proof sets ``W_1 = 0``, which makes the first layer's output ``W_1^T s(...)`` zero, too. What it needs
    is ``W_1 z = 0`` at the equilibrium, that is ``W_1 W_L^T = 0``, which holds for three hidden layers or more. If
    there are fewer, identities are added, which requires an activation with ``s(s(v)) = s(v)`` (ReLU, clips), or an
    OptionError is raised. Weights may be larger than 1 in norm; the plain iteration still comes to rest after two
    steps.
    """
    prior = prox_for(activation)
    if len(linears) < 2:
        raise OptionError(f"Expected a network with a hidden layer, two linear layers or more; found {len(linears)}.")
    matrices: list[Tensor] = [linear.weight.detach() for linear in linears]
    biases: list[Tensor] = [
        linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears
    ]
    probe = torch.linspace(-3, 3, 101, dtype=torch.float64)
    if len(matrices) - 1 < _FEWEST and not torch.allclose(prior.prox(prior.prox(probe)), prior.prox(probe)):
        raise OptionError(
            f"Expected three hidden layers or more for the activation {prior.name!r}; found {len(matrices) - 1}. Fewer "
            "need an idempotent activation, such as ReLU."
        )
    while len(matrices) - 1 < _FEWEST:
        width = len(matrices[-2])
        matrices.insert(-1, torch.eye(width).to(matrices[0]))
        biases.insert(-1, matrices[0].new_zeros(width))
    factors = universal_weights(matrices[1:])
    inputs, state = matrices[0].shape[1], factors[0].shape[1]
    made: dict[str, Any] = {"device": matrices[0].device, "dtype": matrices[0].dtype}
    layers = []
    for index, (W, bias) in enumerate(zip(factors[:-1], biases[:-1], strict=True)):
        layer = OptEqLayer.linear(state, inputs, len(W), activation=activation, constraint="none", norm=1.0, **made)
        with torch.no_grad():
            layer.W.weight.copy_(W)
            layer.U.weight.copy_(matrices[0] if index == 0 else torch.zeros_like(layer.U.weight))
            assert layer.U.bias is not None
            layer.U.bias.copy_(bias)
        layers.append(layer)
    last = nn.Linear(state, len(factors[-1]), **made)
    with torch.no_grad():
        last.weight.copy_(factors[-1])
        last.bias.copy_(biases[-1])
    return nn.Sequential(DeepOptEq(layers, alpha=1.0, solver="fixed_point", iters=4), last)
