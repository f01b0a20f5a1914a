"""Where the kernels in Gluon run, and where not; what is said of other releases of Triton."""

from typing import Any

import pytest
import torch
import triton

import fuser
from fuser import Sequential, ops
from ops.kernels.grouped_gemm.measured_tiles import GLUON_GROUPS, Gemm, why_not_tile
from ops.kernels.grouped_gemm.tile_rules import IN_GLUON, MANY_ROWS, k_grouped_config
from recipes.triton import gates
from recipes.triton import launch as launches
from recipes.triton.gates import warn_of_release, why_no_gluon, why_not_repeated, why_not_this_release
from recipes.triton.launch import Launch

HOPPER = (9, 0)
NO_GLUON = "They are written in the Gluon of Triton 3.6 to 3.9, and this is Triton 3.10.0."
UNKNOWN = (
    f"Kernels in Gluon are not used, which takes the GPU longer. {NO_GLUON} Launches are not repeated, which takes the "
    "host longer: that is written for Triton 3.6 to 3.9, and this is Triton 3.10.0."
)
WGRAD = Gemm("NT", torch.bfloat16, torch.bfloat16, False, 4, 64, 32)


@pytest.fixture
def release(monkeypatch):
    """Says which release of Triton this is, and that it compiles."""
    monkeypatch.setattr(gates, "INTERPRET", False)

    def say(version):
        monkeypatch.setattr(triton, "__version__", version)
        forget()

    def forget():
        why_no_gluon.cache_clear()
        warn_of_release.cache_clear()

    forget()
    yield say
    forget()


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_they_run_on_hopper_in_the_gluon_of_supported_releases(version, release):
    release(version)
    assert why_no_gluon(HOPPER) is None
    assert why_no_gluon((10, 0)) == "They are for compute capability 9.0 (Hopper), and this is 10.0."
    assert why_not_this_release() is None and why_not_repeated() is None


def test_another_release_is_done_without_and_explained(release):
    release("3.10.0")
    assert why_no_gluon(HOPPER) == NO_GLUON and why_not_repeated() in UNKNOWN
    sequential = Sequential(ops.SiLU())
    assert sequential.explain(device="cuda").splitlines()[0].endswith(f". {UNKNOWN}")
    assert UNKNOWN not in sequential.explain(device="cpu")
    assert fuser.explain(sequential, device="cuda").splitlines()[-1] == UNKNOWN
    assert UNKNOWN not in fuser.explain(sequential, device="cpu")


class Kernel:
    """In place of one that Triton compiles."""

    params = ()
    arg_names = ()

    def __getitem__(self, grid):
        return lambda *args, **constants: lambda *last: None


def test_the_first_launch_warns_of_another_release_and_no_further_one(release, monkeypatch):
    monkeypatch.setattr(launches, "JITFunction", Kernel)
    x = torch.ones(1)
    release("3.7.1")
    Launch(Kernel())(x, 1)
    release("3.10.0")
    with pytest.warns(RuntimeWarning) as warned:
        Launch(Kernel())(x, 1)
        Launch(Kernel())(x, 1)
    assert [str(warning.message) for warning in warned] == [UNKNOWN]


def test_they_are_not_interpreted(release, monkeypatch):
    release("3.6.0")
    monkeypatch.setattr(gates, "INTERPRET", True)
    assert why_no_gluon(HOPPER) == "Triton interprets, and its interpreter knows no Gluon."


def config(groups=8, dtype=torch.bfloat16, out_dtype=None, *, accumulate=False, gluon=True, descriptors=True):
    return k_grouped_config(
        8192, groups, dtype, out_dtype=out_dtype or dtype, tf32=False, aligned=False, descriptors=descriptors,
        accumulate=accumulate, capability=HOPPER, gluon=gluon,
    )  # fmt: skip


def test_weight_gradients_of_16_bit_operands_take_them():
    float32: dict[str, Any] = {"out_dtype": torch.float32}
    assert config() == config(dtype=torch.float16) == IN_GLUON
    many, few = 8192 // MANY_ROWS, 8192 // MANY_ROWS + 1
    assert config(many, **float32) == config(few, **float32) == IN_GLUON._replace(box=64)
    assert config(many, **float32, accumulate=True) == IN_GLUON._replace(box=64)
    assert config(few, **float32, accumulate=True) == IN_GLUON._replace(num_stages=6, fetches=True)
    assert config(GLUON_GROUPS) == IN_GLUON and not config(GLUON_GROUPS + 1).gluon
    others = (config(gluon=False), config(descriptors=False), config(dtype=torch.float32), config(accumulate=True))
    assert not any(other.gluon for other in others)


@pytest.mark.parametrize(("gemm", "changes", "reason"), [
    (WGRAD, {}, None),
    (WGRAD._replace(num_groups=GLUON_GROUPS, out_dtype=torch.float32), {"box": 64}, None),
    (WGRAD._replace(num_groups=GLUON_GROUPS, out_dtype=torch.float32, accumulate=True), {"box": 64}, None),
    (WGRAD._replace(out_dtype=torch.float32, accumulate=True), {"num_stages": 6, "fetches": True}, None),
    (WGRAD, {"fetches": True}, "is for kernels in Gluon that add"),
    (WGRAD._replace(out_dtype=torch.float32), {}, "bytes of shared memory"),
    (WGRAD._replace(accumulate=True), {}, "is for weight gradients that are written, or added to float32"),
    (WGRAD._replace(product="TN"), {"block_k": 64, "num_stages": 4}, None),
    (WGRAD._replace(product="NN"), {"num_stages": 2}, None),
    (WGRAD, {"num_stages": 2}, None),
    (WGRAD._replace(product="TN"), {}, None),
    (WGRAD._replace(product="TN"), {"num_stages": 1}, "two stages or more"),
    (WGRAD._replace(product="NN"), {"num_stages": 1}, "two stages or more"),
    (WGRAD._replace(product="TN"), {"block_k": 128, "num_stages": 2}, "64 features a step"),
    (WGRAD._replace(product="NN"), {"block_k": 128, "num_stages": 2}, None),
    (WGRAD._replace(out_dtype=torch.float32), {"box": 0}, "is stored by 64 or 128 columns"),
    (WGRAD, {"box": 32}, "is stored by 64 or 128 columns"),
    (WGRAD, {"block_n": 128}, "must be 128x256, of 8 warps and one program"),
    (WGRAD, {"num_stages": 9}, "bytes of shared memory"),
    (WGRAD, {"num_stages": 1}, "two stages or more"),
    (WGRAD._replace(num_groups=GLUON_GROUPS + 1), {}, "is for 512 groups at most, and there are 513"),
])  # fmt: skip
def test_what_a_tile_in_gluon_may_be(gemm, changes, reason, release):
    release("3.6.0")
    refusal = why_not_tile(IN_GLUON._replace(**changes), gemm, HOPPER)
    assert refusal is None if reason is None else reason in refusal


def test_a_tile_in_gluon_is_refused_where_there_is_none(release):
    release("3.10.0")
    assert why_not_tile(IN_GLUON, WGRAD, HOPPER) == (
        f"The tile 128x256x32, 8 warps, 8 stages in Gluon is one of kernels that cannot run. {NO_GLUON}"
    )
