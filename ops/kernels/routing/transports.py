"""How rows go from rank to rank, and return: the names that `Dispatch` and `Combine` take."""

from __future__ import annotations

import torch

# Why steps of each are not repeated.
WHY_IN_FULL = {
    "alltoall": "all_to_all_single takes the row counts from the host, where each forward reads them.",
    "symmetric": "The barriers of symmetric memory are issued by torch, in each step anew.",
}
TRANSPORTS = tuple(WHY_IN_FULL)
# How the owner's sum of a token's rows returns, for `Sequential.explain()`.
PARTIAL_SUMS = {
    "float32": "partial sums by the rank of their experts, sent unrounded",
    "rounded": "partial sums by the rank of their experts, rounded before they are sent",
}


def check_transport(transport: str, group: object) -> str:
    """Raise ValueError for another name, and for one other than the default without a group."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}, but must be one of {', '.join(map(repr, TRANSPORTS))}.")
    if group is None and transport != "alltoall":
        raise ValueError(f"transport is {transport!r}, but there is no group to transfer rows in. Give group as well.")
    return transport


def check_partial_sums(partial_sums: str | None, group: object) -> str | None:
    """Raise ValueError for another name, or without a group."""
    if partial_sums is None:
        return None
    if partial_sums not in PARTIAL_SUMS:
        raise ValueError(
            f"partial_sums is {partial_sums!r}, but must be None or one of {', '.join(map(repr, PARTIAL_SUMS))}."
        )
    if group is None:
        raise ValueError(
            f"partial_sums is {partial_sums!r}, but there is no group: all rows of a token are on one rank, which sums "
            "them. Give group as well, or leave it out."
        )
    return partial_sums


def sent_dtype(partial_sums: str, dtype: torch.dtype) -> torch.dtype:
    """In what the sums of rows of `dtype` are sent."""
    return dtype if partial_sums == "rounded" else torch.promote_types(dtype, torch.float32)
