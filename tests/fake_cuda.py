"""Runs a forward pass on a CUDA device that does not exist: wrong devices and looks at values raise."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call


def on_fake_cuda(model: nn.Module, x: Tensor, recorded: bool) -> Tensor:
    """Returns the output for an input there; autograd records it, but its engine does not run there."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode, torch.set_grad_enabled(recorded):
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        fake = {name: mode.from_tensor(one).to("cuda").detach() for name, one in state.items()}
        for name, parameter in model.named_parameters():
            fake[name].requires_grad_(parameter.requires_grad)
        y = functional_call(model, fake, (mode.from_tensor(x).to("cuda"),))
        assert y.device.type == "cuda" and y.requires_grad == recorded
    return y
