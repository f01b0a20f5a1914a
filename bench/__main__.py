"""`python -m bench`: the training demo and the benchmarks."""

import argparse
import sys

from bench import (
    bench_casts,
    bench_compile,
    bench_decode,
    bench_elementwise,
    bench_graphs,
    bench_host,
    bench_parallel,
    bench_recipes,
    bench_speed,
    bench_tune,
    explain,
    train,
)
from bench.usage import UsageError

COMMANDS = {
    "train": (train, "train a byte-level mixture-of-experts language model under several recipes and compare them"),
    "explain": (explain, "print the plan of a known model's expert layer"),
    "host": (bench_host, "cost of the framework on the host, against one hand-written autograd.Function"),
    "speed": (bench_speed, "the bf16 path against torch, other libraries and the limit, on a GPU"),
    "casts": (bench_casts, "quantize and dequantize of every recipe against a device copy"),
    "recipes": (bench_recipes, "one grouped MLP whose recipe is switched: speed, memory and error of each recipe"),
    "graphs": (bench_graphs, "an expert layer replayed from CUDA graphs, against eager and against its kernels alone"),
    "compile": (bench_compile, "a step under torch.compile, against the same step run eagerly"),
    "decode": (bench_decode, "a few tokens without gradients, against the time in which the weights can be read"),
    "tune": (bench_tune, "the fastest tiles of the grouped GEMM for given shapes, as a table, on a GPU"),
    "parallel": (bench_parallel, "the complete layer with experts divided among ranks, against one rank that has all"),
    "elementwise": (bench_elementwise, "element-wise chains against torch eager, torch.compile and a device copy"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command. Exit code: 0 on success, 1 if a check failed, 2 for wrong arguments or files."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.main(arguments)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
