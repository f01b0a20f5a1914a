"""The report of `bench parallel`: the table of a model, its transfers over symmetric memory, and the targets."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from bench.case import PASSES
from bench.parallel_ways import CAPTURED, OURS, OVERLAP, OVERLAPPED, SYMMETRIC
from bench.symmetric_transfers import SymmetricTransfers
from bench.table import print_table
from bench.timing import Timing

# Of forward + backward with 8,192 tokens a rank, in bf16
OF_ONE_RANK, OF_ONE_RANK_OVERLAPPED, OF_PEER_RATE = 0.80, 0.90, 0.85


@dataclass(frozen=True)
class Measured:
    """One candidate in one pass. times: seconds of the slowest rank; tokens: of a rank.

    host: seconds until all work is issued, on a GPU. transfers: seconds of the exchanges alone, or of the kernels that
    transfer, with the bytes that cross the link for this rank. symmetric: more about these kernels. sqnr: dB against
    "one rank" in bf16.
    """

    model: str
    ranks: int
    tokens: int
    passes: str
    way: str
    recipe: str
    flop: int
    times: Timing
    host: Timing | None
    transfers: Timing | None
    bytes_sent: int | None
    symmetric: SymmetricTransfers | None
    sqnr: dict[str, float]
    of_one_rank: float

    @property
    def tokens_per_s(self) -> float:
        """Of a rank."""
        return self.tokens / self.times.median

    @property
    def tflop_per_s(self) -> float:
        """Of a rank."""
        return self.flop / self.times.median / 1e12

    @property
    def share_in_transfer(self) -> float | None:
        return None if self.transfers is None else self.transfers.median / self.times.median


class Target(NamedTuple):
    """A figure and its limit: at least that, or at most."""

    what: str
    figure: float
    limit: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def __str__(self) -> str:
        sign, verdict = ">=" if self.at_least else "<=", "met" if self.is_met else "missed"
        return f"{self.what} {self.figure:.3f} ({sign} {self.limit:.2f}: {verdict})"


def targets(found: Sequence[Measured]) -> list[Target]:
    """Those of "symmetric" in forward + backward of one model; none where it was not measured on GPUs."""
    ways = {one.way: one for one in found if one.passes == PASSES[-1]}
    symmetric = ways.get(SYMMETRIC)
    if symmetric is None or symmetric.symmetric is None:
        return []
    return [
        Target("rate against one rank", symmetric.of_one_rank, OF_ONE_RANK, True),
        *(
            Target(f"the same, {way.removeprefix(SYMMETRIC)[2:]}", ways[way].of_one_rank, OF_ONE_RANK_OVERLAPPED, True)
            for way in (OVERLAP, CAPTURED[OVERLAP])
            if way in ways
        ),
        *(
            Target(f"{use.name} of the peer's {use.direction} rate", use.of_peer_rate, OF_PEER_RATE, True)
            for use in symmetric.symmetric.kernels
        ),
        *(
            Target(f"time against {way}", symmetric.times.median / ways[way].times.median, 1.0, False)
            for way in (OURS, OVERLAPPED)
        ),
    ]


def show(found: Sequence[Measured]) -> None:
    """Print the tables of one model, and a line with its targets."""
    _show_ways(found)
    _show_transfers([one for one in found if one.symmetric is not None])
    reached = targets(found)
    if reached:
        print(f"{found[0].model}, targets of {SYMMETRIC}, {PASSES[-1]}: {'; '.join(map(str, reached))}", flush=True)


def figures(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """The content of the JSON file."""
    return [
        asdict(one)
        | {name: None if timing is None else timing._asdict() for name, timing in _timings(one).items()}
        | {"tokens_per_s": one.tokens_per_s, "tflop_per_s": one.tflop_per_s}
        | {"share_in_transfer": one.share_in_transfer}
        | {"symmetric": None if one.symmetric is None else one.symmetric.figures()}
        | {"sqnr": {name: db if math.isfinite(db) else "the same bits" for name, db in one.sqnr.items()}}
        for one in found
    ]


def target_figures(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """The targets of all models, for the JSON file."""
    return [
        {"model": model, "is_met": target.is_met, **target._asdict()}
        for model, of_model in itertools.groupby(found, lambda one: one.model)
        for target in targets(list(of_model))
    ]


def _timings(one: Measured) -> dict[str, Timing | None]:
    return {"times": one.times, "host": one.host, "transfers": one.transfers}


def _show_ways(found: Sequence[Measured]) -> None:
    rows = []
    for passes, ways in itertools.groupby(found, lambda one: one.passes):
        for index, one in enumerate(ways):
            share, sent = one.share_in_transfer, one.bytes_sent
            rate = None if one.transfers is None or sent is None else sent / one.transfers.median / 1e9
            rows.append(
                [
                    "" if index else f"{one.model}, {one.tokens} tokens a rank, {passes}",
                    one.way,
                    f"{one.times.median * 1e3:.3f}",
                    f"{one.times.low * 1e3:.3f} - {one.times.high * 1e3:.3f}",
                    f"{one.tokens_per_s:,.0f}",
                    f"{one.tflop_per_s:.3g}",
                    f"{one.of_one_rank:.3f}",
                    "-" if share is None else f"{share:.3f}",
                    "-" if sent is None else f"{sent / 1e6:.4g}",
                    "-" if rate is None else f"{rate:.3g}",
                    "-" if one.host is None else f"{one.host.median * 1e3:.3f}",
                ]
            )
    headers = [
        "", "way", "median ms", "quartiles", "tokens/s a rank", "TFLOP/s a rank", "of one rank", "in transfer",
        "MB sent", "GB/s sent", "host ms",
    ]  # fmt: skip
    print_table(f"Complete layer on {found[0].ranks} ranks", headers, rows)


def _show_transfers(found: Sequence[Measured]) -> None:
    rows = []
    for one in found:
        assert one.symmetric is not None
        for index, use in enumerate(one.symmetric.kernels):
            rows.append(
                [
                    "" if index else f"{one.way}, {one.passes}",
                    use.name,
                    f"{use.seconds * 1e3:.3f}",
                    f"{use.num_bytes / 1e6:.4g}",
                    f"{use.rate / 1e9:.1f}",
                    f"{use.of_peer_rate:.3f}",
                ]
            )
        rows.append(["", "barriers, with waiting", f"{one.symmetric.barriers.median * 1e3:.3f}", "-", "-", "-"])
    if rows:
        headers = ["", "kernel", "ms", "MB over the link", "GB/s", "of the peer's rate"]
        print_table(f"{found[0].model}: kernels that transfer, of the slowest rank", headers, rows)
