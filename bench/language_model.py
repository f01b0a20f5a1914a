"""A byte-level mixture-of-experts language model whose blocks are Sequentials: what `bench train` trains.

    bytes [B, T] -> embedding + positions -> blocks on [B*T, H] -> RMSNorm -> head -> logits [B, T, 256]
    block = Sequential(attention, MakeExtraOutput, RMSNorm, Router,
                       Dispatch, GroupedLinear, ScaledSwiGLU, GroupedLinear, Combine, AddExtraInput)

Attention is an ordinary `nn.Module` inside the Sequential. Parameters are fp32. `torch.autocast` sets the dtype of the
products, and `fuser.autocast` their number format.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench.models import ExpertShape, expert_operations
from fuser import Sequential

NUM_BYTES = 256


@dataclass(frozen=True)
class LanguageModelConfig:
    """A size of the model, with its batch size and learning rate.

    cpu_threads: the number of threads to use, None for all. For tiny, a second thread gains nothing, and makes it eight
    times slower if another program uses its core (measured on 2 cores).
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_experts: int
    topk: int
    intermediate: int
    context: int
    batch_size: int
    learning_rate: float = 1e-3
    cpu_threads: int | None = None

    @property
    def experts(self) -> ExpertShape:
        return ExpertShape(self.hidden, self.intermediate, self.num_experts, self.topk, self.batch_size * self.context)


LANGUAGE_MODELS = {
    "micro": LanguageModelConfig(
        1, 32, 2, num_experts=4, topk=2, intermediate=32, context=32, batch_size=4, cpu_threads=1
    ),
    "tiny": LanguageModelConfig(
        2, 128, 4, num_experts=8, topk=2, intermediate=128, context=128, batch_size=16, cpu_threads=1
    ),
    "small": LanguageModelConfig(4, 256, 4, num_experts=16, topk=2, intermediate=256, context=256, batch_size=16),
    "large": LanguageModelConfig(
        12, 1024, 16, num_experts=32, topk=4, intermediate=512, context=2048, batch_size=8, learning_rate=3e-4
    ),
}


class CausalSelfAttention(nn.Module):
    """x + attention(norm(x)) on [B*T, H], causal; each T consecutive rows are one text."""

    def __init__(self, hidden: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.context = context
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, hidden = x.shape
        normed = self.norm(x.to(self.norm.weight.dtype))  # torch.autocast does not cast a norm's inputs
        heads = self.qkv(normed).view(-1, self.context, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.projection(mixed.transpose(1, 2).reshape(rows, hidden))


class LanguageModel(nn.Module):
    """bytes [B, T] int64 -> logits [B, T, 256] and the sum of the blocks' load-balancing losses, ().

    mesh: its dimension ep divides the experts, between which tokens go by this transport; each rank has its own texts,
    and the mean of what all ranks return is the load-balancing loss of all texts.
    """

    def __init__(
        self, config: LanguageModelConfig, mesh: DeviceMesh | None = None, transport: str = "alltoall"
    ) -> None:
        super().__init__()
        self.mesh = mesh
        experts = config.experts
        over_ranks: dict[str, Any] = {}
        if mesh is not None:
            experts = replace(experts, tokens=experts.tokens // mesh["dp"].size())
            over_ranks = {"group": mesh["ep"], "transport": transport}
        self.embedding = nn.Embedding(NUM_BYTES, config.hidden)
        self.positions = nn.Parameter(torch.empty(config.context, config.hidden))
        self.blocks = nn.ModuleList(
            Sequential(
                CausalSelfAttention(config.hidden, config.num_heads, config.context),
                *expert_operations(experts, **over_ranks),
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, NUM_BYTES, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices: normal, standard deviation 0.5 / sqrt(last size), which learned fastest here; norms: ones."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        batch, context = inputs.shape
        x = (self.embedding(inputs) + self.positions).flatten(0, 1)
        balance = []
        for block in self.blocks:
            if self.mesh is None:
                x, extras = block(x, outputs=("load_balancing_loss",))
                balance.append(extras["load_balancing_loss"])
            else:
                x, extras = block(x, outputs=("logits", "tokens_per_expert"))
                balance.append(_balance_of_all(**extras))
        logits = self.head(self.norm(x.to(self.norm.weight.dtype)))
        return logits.view(batch, context, NUM_BYTES), torch.stack(balance).sum()


def _balance_of_all(logits: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """The part of this rank in the Router's load_balancing_loss of the tokens of all ranks, which is their mean.

    E sum_e f_e P_e: f_e is counted on all ranks, P_e is the mean of the ranks' P_e, which have as many tokens each.
    """
    counts = tokens_per_expert.clone()
    dist.all_reduce(counts)
    return logits.shape[1] * (counts / counts.sum() * logits.softmax(-1).mean(0)).sum()
