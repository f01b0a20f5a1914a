"""Memory that several processes map, in place of symmetric memory: for kernels under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from unittest.mock import patch
from weakref import ref

import torch
import torch.distributed as dist

from ops.kernels.collectives import RankGroup
from ops.kernels.routing.symmetric_memory import SymmetricMemory


@contextmanager
def symmetric_on_cpu(folder: Path) -> Iterator[None]:
    """Inside, `transport="symmetric"` takes CPU tensors: the ranks map files in `folder`, and meet by gloo."""
    numbers = count()

    def allocate(num_bytes: int, group: RankGroup, device: torch.device) -> SymmetricMemory:
        name = f"{next(numbers)}-{'-'.join(map(str, group.ranks))}"
        files = [str(folder / f"{name}-of-{rank}") for rank in range(group.size)]
        local = torch.from_file(files[group.rank], shared=True, size=num_bytes, dtype=torch.uint8)
        local.fill_(255)  # NaN, and integers that point outside
        dist.barrier(group.process_group)
        of_ranks = [
            local if rank == group.rank else torch.from_file(file, shared=True, size=num_bytes, dtype=torch.uint8)
            for rank, file in enumerate(files)
        ]

        meeting = ref(group.process_group)  # which the buffers, kept by group, must not keep

        def barrier(mapped: object = of_ranks) -> None:
            dist.barrier(meeting())

        return SymmetricMemory(local, torch.tensor([memory.data_ptr() for memory in of_ranks]), barrier)

    with (
        patch("ops.kernels.routing.symmetric_memory.allocate", allocate),
        patch("ops.dispatch.why_not_symmetric", lambda device: None),
    ):
        yield
