"""Train a mixture-of-experts model with FSDP2 under a recipe, save a checkpoint, and go on from it.

    torchrun --nproc-per-node 2 docs/examples/fsdp2.py [--recipe mxfp8] [--folder FOLDER]

With a GPU for each rank over NCCL, else over gloo on CPUs.
"""
# T tokens, H hidden size, F expert size, E experts

from __future__ import annotations

import argparse
import gc
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fuser import Sequential, autocast, ops, prepare
from fuser.distributed import TrainingState

T, H, F, E, LAYERS = 64, 64, 32, 8, 2


class Model(nn.Module):
    """Residual mixture-of-experts layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([moe_layer() for _ in range(LAYERS)])
        self.head = ops.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def moe_layer() -> Sequential:
    return Sequential(
        ops.MakeExtraOutput("residual"), ops.RMSNorm(H), ops.Router(H, E, topk=2), ops.Dispatch(E),
        ops.GroupedLinear(E, H, 2 * F, bias=False), ops.ScaledSwiGLU(), ops.GroupedLinear(E, F, H, bias=False),
        ops.Combine(), ops.AddExtraInput("residual"),
    )  # fmt: skip


def make(recipe: str, device: torch.device) -> tuple[Model, torch.optim.Optimizer]:
    """The sharded model, the same on all ranks, and its optimizer, which is made behind fully_shard."""
    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    prepare(model, recipe)  # the state of fp8_delayed, which a load looks for
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model: Model, optimizer: torch.optim.Optimizer, recipe: str, steps: range, device: torch.device) -> float:
    """The last loss, the mean over the ranks."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(T, H, generator=generator).to(device)
        with autocast(recipe):
            loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def job(recipe: str, folder: str, device: torch.device) -> None:
    """20 steps and a checkpoint, 10 more, and the same 10 from the checkpoint."""
    model, optimizer = make(recipe, device)
    first = train(model, optimizer, recipe, range(1), device)
    train(model, optimizer, recipe, range(1, 20), device)
    dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)
    last = train(model, optimizer, recipe, range(20, 30), device)

    resumed, optimizer = make(recipe, device)
    dcp.load({"training": TrainingState(resumed, optimizer)}, checkpoint_id=folder)
    again = train(resumed, optimizer, recipe, range(20, 30), device)
    if dist.get_rank() == 0:
        print(f"loss {first:.4f} at the first step, {last:.4f} at the last, {again:.4f} from the checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "fsdp2-checkpoint"))
    arguments = parser.parse_args()
    rank, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        job(arguments.recipe, arguments.folder, device)
    finally:
        # The models hold the process group. One that lives on until the interpreter's end may abort this process there:
        # gloo's thread frees the last collective's tensors, and waits for an interpreter that is gone.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
