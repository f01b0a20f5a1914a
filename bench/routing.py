"""The division of a benchmark's rows among its experts."""

import itertools

import torch
from torch import Tensor

ROUTINGS = ("uniform", "random", "skewed")
ZIPF = 1.2  # the exponent of skewed routing; 1 in results of before 2026-11-23


def split_sizes(num_groups: int, rows: int, routing: str) -> list[int]:
    """Rows of each group: equal, random, or by `zipf_shares`; they sum to `rows`."""
    if routing == "uniform":
        shares = torch.ones(num_groups)
    elif routing == "random":
        drawn = torch.randint(num_groups, (rows,), generator=torch.Generator().manual_seed(0))
        shares = torch.bincount(drawn, minlength=num_groups)
    else:
        shares = zipf_shares(num_groups)
    ends = (shares.double().cumsum(0) / shares.double().sum() * rows).round().long().tolist()
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def zipf_shares(num_groups: int) -> Tensor:
    """[num_groups], not normalised: n^-1.2 in random order; one in sixteen groups, at least one, gets 0."""
    shares = torch.arange(1, num_groups + 1) ** -ZIPF
    shares[-max(1, num_groups // 16) :] = 0
    return shares[torch.randperm(num_groups, generator=torch.Generator().manual_seed(0))]
