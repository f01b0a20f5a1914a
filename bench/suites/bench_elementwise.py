"""Element-wise chains by dtype, pass and candidate: those of `bench elementwise`, with its checks against float64."""

from functools import lru_cache

import pytest

from bench.bench_elementwise import CHAINS, SHAPES, CheckedPasses, checked_passes
from bench.case import PASSES
from bench.suites.cases import DEVICE, PASS_IDS, Measure

CANDIDATES = ["ours", "eager", *(["compile"] if DEVICE == "cuda" else []), "copy"]


@lru_cache(maxsize=1)
def checked_of(chain: str, dtype: str) -> dict[str, CheckedPasses]:
    rows, features = SHAPES[DEVICE]
    found = checked_passes(chain, dtype, rows=rows, features=features, device=DEVICE)
    return {checked.passes: checked for checked in found}


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # from torch.compile
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("passes", PASSES, ids=PASS_IDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("chain", CHAINS)
def test_elementwise(chain: str, dtype: str, passes: str, candidate: str, measure: Measure) -> None:
    checked = checked_of(chain, dtype)[passes]
    measure(checked.steps[candidate], f"{chain}, {dtype}, {passes}", num_bytes=checked.bytes)
