"""By what rows go from rank to rank: the names that `Dispatch` and `Combine` take."""

from __future__ import annotations

# Why steps of each are not repeated.
WHY_IN_FULL = {
    "alltoall": "all_to_all_single takes the row counts from the host, where each forward reads them.",
    "symmetric": "The barriers of symmetric memory are issued by torch, in each step anew.",
}


def check_transport(transport: str, group: object) -> str:
    """Raise ValueError for another name, and for one other than the default without a group."""
    if transport not in WHY_IN_FULL:
        raise ValueError(f"transport is {transport!r}, but must be one of {', '.join(map(repr, WHY_IN_FULL))}.")
    if group is None and transport != "alltoall":
        raise ValueError(f"transport is {transport!r}, but there is no group to transfer rows in. Give group as well.")
    return transport
