"""The environment of a measurement: device, versions, date. Every table and every results file includes it."""

import datetime
import platform
import shutil
import subprocess

import torch

from recipes.triton.gates import triton


def environment(device: torch.device | str) -> dict[str, str]:
    """Name -> value, all strings."""
    device = torch.device(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ or "none",
    }


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the CPU type and the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def gpu_state() -> dict[str, str]:
    """The current state of torch's GPU from nvidia-smi: clocks, power, driver. Empty without a GPU or nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available():
        return {}
    names = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "driver_version")
    gpu = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"
    command = [program, gpu, f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return dict(zip(names, map(str.strip, done.stdout.split(",")), strict=False)) if done.returncode == 0 else {}
