"""What the arguments of `Router` may be, each alone and together with the others, when it is made and later."""

from __future__ import annotations

import math

from ops.kernels.routing.routing import ScoreFunction
from recipes.arguments import as_number, positive_integers


def as_score_function(name: str, value: object) -> ScoreFunction:
    """ "softmax" or "sigmoid", or ValueError."""
    if value == "softmax":
        return "softmax"
    if value == "sigmoid":
        return "sigmoid"
    raise ValueError(f"{name} is {value!r}, but must be 'softmax' or 'sigmoid'. Pass one of these.")


def as_positive(name: str, value: object) -> float:
    """A positive, finite number. TypeError for another kind, ValueError for another number."""
    number = as_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {number}, but must be positive and finite. Pass such a number, or leave it out.")
    return number


def as_coefficient(name: str, value: object) -> float | None:
    """The same, or None."""
    return None if value is None else as_positive(name, value)


def as_number_of_groups(name: str, value: object) -> int:
    """A positive integer. TypeError for another kind, ValueError for another number."""
    return positive_integers("Router", **{name: value})[0]


def check_choice(num_experts: int, topk: int, score_function: ScoreFunction, num_groups: int, topk_groups: int) -> None:
    """Raise ValueError unless so many experts can be chosen from those groups."""
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk is {topk}, but must be between 1 and num_experts={num_experts}.")
    if num_experts % num_groups:
        raise ValueError(
            f"num_groups is {num_groups}, but must divide num_experts={num_experts}. "
            "Pass a divisor, or 1 to choose among all experts."
        )
    if topk_groups > num_groups:
        raise ValueError(
            f"topk_groups is {topk_groups}, but there are num_groups={num_groups}. Pass at most that many."
        )
    per_group = num_experts // num_groups
    if topk_groups * per_group < topk:
        raise ValueError(
            f"topk is {topk}, but topk_groups={topk_groups} of num_groups={num_groups} hold "
            f"{topk_groups * per_group} of the {num_experts} experts. Raise topk_groups, or lower topk."
        )
    if score_function == "sigmoid" and topk_groups < num_groups and per_group < 2:
        raise ValueError(
            f"num_groups={num_groups} leaves one expert in each group, but with sigmoid a group is as good as its "
            "two best. Pass fewer groups."
        )


def check_scores(score_function: ScoreFunction, use_pre_softmax: bool, has_expert_bias: bool) -> None:
    """Raise NotImplementedError for an expert_bias with softmax, ValueError for use_pre_softmax=False with sigmoid."""
    if score_function == "softmax" and has_expert_bias:
        raise NotImplementedError(
            "expert_bias=True was given with score_function='softmax', but the bias is added to sigmoid scores. "
            "Pass score_function='sigmoid', or balance with the extra output load_balancing_loss."
        )
    if score_function == "sigmoid" and not use_pre_softmax:
        raise ValueError(
            "use_pre_softmax=False was given with score_function='sigmoid', which has no softmax. Leave it out; "
            "normalize_probs=True divides the scores by their sum."
        )
