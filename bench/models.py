"""Expert layers of known models by name: their shapes, and their operations.

H hidden size, F expert width (of gate and up each), E experts on this device, K experts per token; the experts receive
R = tokens * K rows. Sources: the published configurations (`config.json` on each model's page).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fuser import ops

TINY_FACTOR = 16


@dataclass(frozen=True)
class ExpertShape:
    """One expert layer, with the model's activation and bias. tokens: the default number of tokens in benchmarks."""

    hidden: int  # H
    intermediate: int  # F
    num_experts: int  # E
    topk: int  # K
    tokens: int = 8192
    activation: str = "ScaledSwiGLU"
    glu_interleave_size: int | None = None
    bias: bool = False
    use_pre_softmax: bool = True
    normalize_probs: bool = True
    router: Mapping[str, Any] = field(default_factory=dict, hash=False)  # further arguments of the Router
    note: str = ""

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the experts: both projections, with their biases."""
        weights = 3 * self.hidden * self.intermediate
        biases = 2 * self.intermediate + self.hidden if self.bias else 0
        return self.num_experts * (weights + biases)

    @property
    def rows(self) -> int:
        """R: the number of rows that the experts receive for the default tokens."""
        return self.tokens * self.topk

    def tiny(self) -> "ExpertShape":
        """The shape for a CPU: widths, experts and tokens divided by `TINY_FACTOR`.

        Widths are rounded up to a multiple of 32, and there are at least two experts.
        """
        hidden, intermediate = (-(-width // (32 * TINY_FACTOR)) * 32 for width in (self.hidden, self.intermediate))
        num_experts = max(2, self.num_experts // TINY_FACTOR)
        return replace(
            self,
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            topk=min(self.topk, num_experts),
            tokens=self.tokens // TINY_FACTOR,
            note=f"widths, experts and tokens of the model divided by {TINY_FACTOR}",
        )


# gpt-oss interleaves gate and up (even, odd columns), clamps both and scales by a sigmoid; its probabilities are a
# softmax over the top K logits.
_GPT_OSS = ExpertShape(
    2880,
    2880,
    128,
    4,
    activation="ScaledClampedQGeGLU",
    glu_interleave_size=1,
    bias=True,
    use_pre_softmax=False,
    normalize_probs=False,
    router={"bias": True},
)

# The scores are sigmoids, and a bias that is moved towards an even load takes part in the choice alone.
_SIGMOID = {"score_function": "sigmoid", "expert_bias": True}

EXPERT_SHAPES = {
    "qwen3-30b-a3b": ExpertShape(2048, 768, 128, 8),
    "qwen3-235b-a22b": ExpertShape(4096, 1536, 128, 8),
    "deepseek-v2-lite": ExpertShape(2048, 1408, 64, 6, normalize_probs=False),
    "olmoe-1b-7b": ExpertShape(2048, 1024, 64, 8, normalize_probs=False),
    "mixtral-8x7b": ExpertShape(4096, 14336, 8, 2),
    "gpt-oss-20b": replace(_GPT_OSS, num_experts=32),
    "gpt-oss-120b": _GPT_OSS,
    "deepseek-v3": ExpertShape(
        7168, 2048, 256, 8, router={**_SIGMOID, "num_groups": 8, "topk_groups": 4, "scaling_factor": 2.5}
    ),
    "deepseek-v3-ep8": ExpertShape(
        7168, 2048, 32, 4, tokens=16384, note="one of 8 expert-parallel ranks: 65,536 rows for its 32 experts"
    ),
    "kimi-k2": ExpertShape(7168, 2048, 384, 8, router={**_SIGMOID, "scaling_factor": 2.827}),
    "kimi-k2-ep8": ExpertShape(
        7168, 2048, 48, 4, tokens=16384, note="one of 8 expert-parallel ranks: 65,536 rows for its 48 experts"
    ),
}
TINY_SHAPES = {f"tiny-{name}": shape.tiny() for name, shape in EXPERT_SHAPES.items()}

_OWN_SHAPE = re.compile("x".join(["([1-9][0-9]{0,6})"] * 4))


class Shapes(dict[str, ExpertShape]):
    """Shapes by name, and those of one's own by EXPERTSxHIDDENxWIDTHxTOPK: 64x2048x1408x6 has 64 experts of hidden size
    2048 and width 1408, of which a token takes 6."""

    def __missing__(self, name: str) -> ExpertShape:
        shape = _own_shape(name)
        if shape is None:
            raise KeyError(name)
        return shape

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or _own_shape(name) is not None

    @property
    def choices(self) -> str:
        return f"{', '.join(self)}, or a shape of your own: EXPERTSxHIDDENxWIDTHxTOPK, such as 64x2048x1408x6"


def _own_shape(name: object) -> ExpertShape | None:
    found = _OWN_SHAPE.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return None
    experts, hidden, width, topk = map(int, found.groups())
    return ExpertShape(hidden, width, experts, topk) if topk <= experts else None


SHAPES = Shapes(EXPERT_SHAPES | TINY_SHAPES)


def expert_operations(
    shape: ExpertShape,
    *,
    device: torch.device | str | None = None,
    group: DeviceMesh | None = None,
    transport: str = "alltoall",
) -> list[nn.Module]:
    """The expert layer on [tokens, H], with its norm and its residual, as the members of one Sequential.

    The Router's `load_balancing_loss` is available as an extra output. group: the ranks that divide the experts, each
    with its share of the tokens; transport: between them, "symmetric" with a capacity for any routing of these
    """
    own = shape.num_experts if group is None else shape.num_experts // group.size()
    over_ranks: dict[str, Any] = {"group": group, "transport": transport}
    capacity = shape.tokens * min(shape.topk, own) if transport == "symmetric" else None
    activation = getattr(ops, shape.activation)(glu_interleave_size=shape.glu_interleave_size)
    router = ops.Router(
        shape.hidden,
        shape.num_experts,
        shape.topk,
        use_pre_softmax=shape.use_pre_softmax,
        normalize_probs=shape.normalize_probs,
        **shape.router,
        device=device,
    )
    return [
        ops.MakeExtraOutput("residual"),
        ops.RMSNorm(shape.hidden, device=device),
        router,
        ops.Dispatch(shape.num_experts, capacity=capacity, **over_ranks),
        ops.GroupedLinear(own, shape.hidden, 2 * shape.intermediate, bias=shape.bias, device=device),
        activation,
        # The scales are applied to FC2's input, so its bias must be scaled separately.
        ops.GroupedLinear(
            own,
            shape.intermediate,
            shape.hidden,
            bias=shape.bias,
            scale_bias=shape.bias,
            device=device,
        ),
        ops.Combine(**over_ranks),
        ops.AddExtraInput("residual"),
    ]
