"""Extra tensors by position, as TransformerEngine counts them, for operations that know theirs by name."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import Tensor

from ops.runner.operation import BasicOperation
from ops.runner.repeat import states
from recipes.arguments import check_flags


class CountedExtras(BasicOperation):
    """An operation whose extra tensors are given, and returned, by position: the order of `extra_inputs`.

    Called alone it is `y = operation(x, *extra_inputs)`, or `(y, *extra_outputs)` where it makes some; the caller's
    buffers are keyword arguments ("output", "grad_input"). By name it is called as every operation.

    shares_tensor: whether a `te.Sequential` that was not called yet takes its extra inputs for those of the same name
        of other operations, as split sizes are
    """

    shares_tensor: ClassVar[bool] = True
    _input_channels: tuple[str | None, ...] = ()
    _output_channels: tuple[tuple[str | None, bool], ...] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if CountedExtras in cls.__bases__:  # `forward` is replaced, which changes nothing of a pass
            for attribute in ("repeatable", "accepts_gathered", "hands_on_rows", "hands_back_rows"):
                setattr(cls, attribute, states(cls.__bases__[-1], attribute))

    @property
    def num_extra_inputs(self) -> int:
        return len(self.extra_inputs)

    @property
    def num_extra_outputs(self) -> int:
        return len(self.extra_outputs)

    def input_channels(self) -> tuple[str | None, ...]:
        """Of each extra input the channel that feeds it; None: the caller."""
        return self._input_channels or (None,) * self.num_extra_inputs

    def output_channels(self) -> tuple[tuple[str | None, bool], ...]:
        """Of each extra output its channel, or None, and whether the caller gets it."""
        return self._output_channels or ((None, True),) * self.num_extra_outputs

    def set_extra_input_channel(self, index: int, channel: str | None) -> Self:
        """Feed this extra input from the earlier operation of the Sequential whose output has this channel; None: by
        the caller.

        Raises IndexError for an index that does not exist, ValueError for a channel that is no text or empty.
        """
        _check_slot("extra input", index, self.num_extra_inputs, channel)
        channels = self.input_channels()
        self._input_channels = (*channels[:index], channel, *channels[index + 1 :])
        return self

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> Self:
        """Let later operations read this extra output by a channel; None: the caller alone gets it.

        Raises as `set_extra_input_channel`, and TypeError for an output_to_caller that is no bool.
        """
        check_flags(output_to_caller=output_to_caller)
        _check_slot("extra output", index, self.num_extra_outputs, channel)
        channels = self.output_channels()
        chosen = (channel, output_to_caller or channel is None)
        self._output_channels = (*channels[:index], chosen, *channels[index + 1 :])
        return self

    def forward(self, input: Tensor, *extra_inputs: Any, **named: Any) -> Any:  # type: ignore[override]
        if named.keys() - set(self.buffer_names):
            if extra_inputs:
                raise TypeError(
                    f"{type(self).__name__} got extra inputs by position and {', '.join(map(repr, named))} by name. "
                    "Give all by position, or all by name."
                )
            return super().forward(input, **named)
        names = [self.extra_name(name) for name in self.extra_inputs]
        check_count(extra_inputs, names)
        outputs = [self.extra_name(name) for name in self.extra_outputs]
        given = dict(zip(names, extra_inputs, strict=True))
        result = super().forward(input, outputs=outputs, buffers=named or None, **given)
        return (result[0], *result[1].values()) if outputs else result


def check_count(given: tuple[Any, ...], names: list[str]) -> None:
    """Raise ValueError unless there is one extra input for each name."""
    if len(given) != len(names):
        raise ValueError(
            f"Expected {len(names)} extra inputs but got {len(given)}. Needed, in this order: "
            f"{', '.join(names) or 'none'}."
        )


def _check_slot(what: str, index: int, count: int, channel: object) -> None:
    if not 0 <= index < count:
        raise IndexError(f"The {what} {index} is out of range: there are {count}.")
    if channel is not None and (not isinstance(channel, str) or not channel):
        raise ValueError(f"The channel is {channel!r}, but must be a non-empty string, or None.")
