"""Where a figure was measured: device, versions, date. Every table and every results file carries it."""

import datetime
import platform

import torch
import triton


def environment(device: torch.device | str) -> dict[str, str]:
    """Name -> value, all strings."""
    device = torch.device(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def device_name(device: torch.device) -> str:
    """The accelerator's own name, or the CPU's kind and how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
