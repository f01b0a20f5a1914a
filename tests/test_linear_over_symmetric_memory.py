"""Linears fused with the transfer of their rows: with the library's own fallback on CPUs, and on two GPUs."""
# T rows of a rank, H features

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as library
from torch import Tensor

from fuser import Sequential, autocast, ops, register_fusion
from fuser.distributed import AllGatherLinear, LinearReduceScatter
from tests.ranks import on_ranks, quietly
from tests.reference import assert_close

H, F, T = 16, 32, 6
FUSIONS = (AllGatherLinear, LinearReduceScatter)


def mlp(fusions: Any = (), device: str = "cpu", **settings: Any) -> Sequential:
    torch.manual_seed(0)
    options = {"group": dist.group.WORLD, "sequence_parallel": True, **settings}
    return Sequential(
        ops.RMSNorm(H),
        ops.Linear(H, 2 * F, bias=False, tensor_parallel="column", gated=True, **options),
        ops.SwiGLU(),
        ops.Linear(F, H, tensor_parallel="row", **options),
        fusions=fusions,
    ).to(device)


def results(layer: Sequential, x: Tensor, frozen: bool = False) -> dict[str, Any]:
    layer[1].weight.requires_grad_(not frozen)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.sin(x.detach()))
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def compare(fusions: Any, device: str, dtype: torch.dtype, *shape: int) -> None:
    fused, unfused = (mlp(chosen, device).to(dtype) for chosen in (fusions, ()))
    x = torch.randn(*shape, H, generator=torch.Generator().manual_seed(dist.get_rank())).to(device, dtype)
    bounds = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-5}
    for frozen in (False, True):
        assert_close(results(fused, x, frozen), results(unfused, x, frozen), bounds)
    explained = fused.explain(device=device)
    for fusion in fusions:
        assert f"{fusion.__name__} = Linear  [{fusion.library} (torch.ops.symm_mem); " in explained


class OnCPUs:
    """With what the library computes in place of its kernels where it tests itself."""

    calls = 0

    @classmethod
    def why_not(cls, operations: Any, request: Any) -> str | None:
        return None if operations[0].parallel.mode == cls.mode else "the other one's"  # type: ignore[attr-defined]


class AllGatherLinearOnCPUs(OnCPUs, AllGatherLinear):
    def product(self, x: Tensor, w_KN: Tensor, group_name: str) -> Tensor:
        OnCPUs.calls += 1
        _, (y,) = library._fused_all_gather_matmul_fallback(x, [w_KN], 0, group_name, return_A=True)
        return y


class LinearReduceScatterOnCPUs(OnCPUs, LinearReduceScatter):
    def product(self, x: Tensor, w_KN: Tensor, group_name: str) -> Tensor:
        OnCPUs.calls += 1
        return library._fused_matmul_reduce_scatter_fallback(x, w_KN, "sum", 0, group_name)


def stand_in_for_gpus(rank: int) -> None:
    with quietly():
        refuse()
        for dtype in (torch.float64, torch.float32):
            compare((AllGatherLinearOnCPUs, LinearReduceScatterOnCPUs), "cpu", dtype, T)
        compare((AllGatherLinearOnCPUs, LinearReduceScatterOnCPUs), "cpu", torch.float64, T, 3)
        assert OnCPUs.calls == 3 * 2 * 2
        wrong = mlp((AllGatherLinearOnCPUs,))
        with pytest.raises(ValueError, match=r"x has shape \[6, 17\], but \[..., 16\] is needed"):
            wrong[1:](torch.randn(T, H + 1))


def refuse() -> None:
    def reasons(device: str = "cuda", recipe: str = "bf16", backend: str = "nccl", **settings: Any) -> list[str]:
        layer = mlp(FUSIONS, **settings)
        for linear in (layer[1], layer[3]):
            linear.parallel.group.backends = {"cuda": backend}
        lines = layer.explain(device=device, recipe=recipe).splitlines()
        return [line.split(": ", 2)[2] for line in lines if "not fused" in line]

    other = ["only a Linear with tensor_parallel='column' and sequence_parallel transfers these rows.",
             "only a Linear with tensor_parallel='row' and sequence_parallel transfers these rows."]  # fmt: skip
    assert reasons() == other[:1], "each takes its own"
    for settings, sentence in (
        ({"device": "cpu"}, "symmetric memory is that of GPUs, but x is on cpu."),
        ({"backend": "gloo"}, "symmetric memory is set up over NCCL, but the group has gloo for cuda."),
        ({"recipe": "mxfp8"}, "recipe mxfp8 quantizes the operands, and this product takes high precision."),
        ({"as_one_group": True}, "as_one_group=True multiplies by the kernel of grouped products, and this is the"),
    ):
        found = reasons(**settings)
        assert sorted(found, key=lambda reason: reason in other)[2:] == other, found
        assert sum(sentence in reason for reason in found) == 2, found
    assert len(reasons(sequence_parallel=False)) == 4
    biased = Sequential(ops.Linear(H, F, tensor_parallel="column", sequence_parallel=True, group=dist.group.WORLD))
    biased[0].parallel.group.backends = {"cuda": "nccl"}
    with register_fusion(AllGatherLinear):
        assert "the bias is added in the product, before its one rounding. Give bias=False." in biased.explain(
            device="cuda"
        )
        with autocast(batch_invariant=True):
            assert "it multiplies the rows in parts, whose bits depend on how many" in biased.explain(device="cuda")


@pytest.mark.slow
def test_they_compute_what_the_linears_do_and_say_why_not(tmp_path: Path) -> None:
    on_ranks(stand_in_for_gpus, folder=tmp_path)


def on_a_gpu(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        compare(FUSIONS, "cuda", dtype, 256)
    compare(FUSIONS, "cuda", torch.bfloat16, 128, 4)


@pytest.mark.gpu
@pytest.mark.gpu2
def test_on_two_gpus_they_compute_what_the_linears_do(tmp_path: Path) -> None:
    on_ranks(on_a_gpu, folder=tmp_path, backend="nccl")
