"""What the tests of adapters share: a model of three linear operations, adapters that are not zero, and one step."""

import torch

from fuser import Sequential, lora, ops


def with_values(model, seed=1):
    """Adapters that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def data(rows=16, features=32, device="cpu", dtype=torch.float32, seed=0):
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype).requires_grad_()


def mlp(**settings):
    torch.manual_seed(0)
    return Sequential(
        ops.GroupedLinear(3, 32, 64, bias=False), ops.SwiGLU(), ops.GroupedLinear(3, 32, 32), ops.Linear(32, 16),
        **settings,
    )  # fmt: skip


def adapted(rank=4, alpha=6.0, **settings):
    model = mlp(**settings)
    lora.add(model, rank, alpha=alpha)
    return with_values(model)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(model, x=None, sizes=(5, 0, 9), function=None, **extras):
    x = data() if x is None else x
    model.zero_grad()
    x.grad = None
    y = (function or model)(x, split_sizes=list(sizes), **extras)
    y.square().sum().backward()
    return {"y": y.detach(), "dx": x.grad} | gradients(model)
