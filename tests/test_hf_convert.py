"""Weights of experts between the layouts of state dicts: the names, the places, the bits."""
# E experts, H hidden size, F expert width

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

reason = "transformers 5 is not installed here, so its models cannot be compared with: `pip install 'fuser-ops[hf]'`."
pytest.importorskip("transformers", minversion="5", reason=reason)

from safetensors.torch import load_file, save_file  # noqa: E402

from fuser import Sequential, ops  # noqa: E402
from fuser.hf import convert  # noqa: E402
from tests.hf_models import GRADIENTS, MODELS, E, F, H, make  # noqa: E402
from tests.reference import assert_close, assert_same_bits  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.rest]

P = "model.layers.1.mlp.experts"
# How each layout is asked for.
LAYOUTS: dict[str, dict[str, Any]] = {
    "per_expert": {"to": "hf"},
    "stacked": {"to": "hf", "hf_layout": "stacked"},
    "transposed": {"to": "hf", "hf_layout": "transposed"},
    "te": {"to": "te"},
    "fuser": {"to": "fuser"},
}
SIZES = [None, 1, 4]


def stacked(*, bias: bool) -> dict[str, Tensor]:
    """Two layers of whole numbers, and tensors around them."""
    state: dict[str, Tensor] = {"model.embed_tokens.weight": torch.arange(12.0).view(4, 3)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        state[f"{prefix}.gate.weight"] = torch.randn(E, H)
        state[f"{prefix}.experts.gate_up_proj"] = torch.randn(E, 2 * F, H).bfloat16()
        state[f"{prefix}.experts.down_proj"] = torch.randn(E, H, F).bfloat16()
        if bias:
            state[f"{prefix}.experts.gate_up_proj_bias"] = torch.randn(E, 2 * F)
            state[f"{prefix}.experts.down_proj_bias"] = torch.randn(E, H)
        state[f"{prefix}.shared_experts.gate_proj.weight"] = torch.randn(F, H)
    return state


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_there_and_back_gives_the_same_bits(source: str, target: str, size: int | None, bias: bool) -> None:
    original = stacked(bias=bias)
    before = dict(convert(original, **LAYOUTS[source], glu_interleave_size=size))
    there = dict(convert(before, **LAYOUTS[target], glu_interleave_size=size))
    back = dict(convert(there, **LAYOUTS[source], glu_interleave_size=size))
    assert list(back) == list(before)
    assert_same_bits(back, before)
    assert_same_bits(dict(convert(there, **LAYOUTS["stacked"], glu_interleave_size=size)), original)
    others = [name for name in original if "experts." not in name or "shared" in name]
    assert len(others) == 5 and all(there[name] is original[name] for name in others)
    assert all(tensor.is_contiguous() for tensor in there.values())


def test_every_matrix_is_where_its_layout_says() -> None:
    state = stacked(bias=True)
    gate_up, bias = state[f"{P}.gate_up_proj"], state[f"{P}.gate_up_proj_bias"]
    one, te, fuser, transposed = (
        dict(convert(state, **LAYOUTS[n])) for n in ("per_expert", "te", "fuser", "transposed")
    )
    assert torch.equal(one[f"{P}.2.gate_proj.weight"], gate_up[2, :F])
    assert torch.equal(one[f"{P}.2.up_proj.weight"], gate_up[2, F:])
    assert torch.equal(one[f"{P}.2.up_proj.bias"], bias[2, F:])
    assert torch.equal(one[f"{P}.5.down_proj.weight"], state[f"{P}.down_proj"][5])
    assert torch.equal(te[f"{P}.fc1.weight2"], gate_up[2]) and torch.equal(te[f"{P}.fc1.bias2"], bias[2])
    assert fuser[f"{P}.fc1.weight"] is gate_up and fuser[f"{P}.fc2.bias"] is state[f"{P}.down_proj_bias"]
    assert torch.equal(transposed[f"{P}.gate_up_proj"][2, :, ::2].T, gate_up[2, :F])
    assert torch.equal(transposed[f"{P}.gate_up_proj_bias"][2, 1::2], bias[2, F:])
    assert torch.equal(transposed[f"{P}.down_proj"][3].T, state[f"{P}.down_proj"][3])
    runs = dict(convert(state, "fuser", glu_interleave_size=4))[f"{P}.fc1.weight"]
    assert torch.equal(runs[2, 8:12], gate_up[2, 4:8]) and torch.equal(runs[2, 4:8], gate_up[2, F : F + 4])


@pytest.mark.parametrize("name", MODELS)
def test_the_files_of_transformers_are_converted_both_ways(name: str, tmp_path: Any) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    in_files = load_file(tmp_path / "model.safetensors")
    in_memory = model.state_dict()
    on_disk, layout = ("transposed", "transposed") if name == "gpt-oss" else ("per_expert", "stacked")
    names = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    rename = {"block_sparse_moe": "mlp"} if name == "mixtral" else {}  # as transformers itself renames Mixtral

    def renamed(state: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
        return {next((key.replace(a, b) for a, b in table.items() if a in key), key): t for key, t in state.items()}

    for to, about in {"fuser": {}, "te": {}, "hf": {"hf_layout": layout}}.items():
        there = dict(convert(in_files, to, **about))
        back = dict(convert(there, "hf", hf_layout=on_disk, hf_names=names))
        assert_same_bits(back, in_files)
    assert_same_bits(renamed(there, rename), {key: in_memory[key] for key in renamed(there, rename)})
    again = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=dict(convert(in_files, "hf", hf_names=names, hf_layout=on_disk)),
    )
    assert_same_bits(again.state_dict(), in_memory)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("to", ["te", "fuser"])
@pytest.mark.parametrize("size", SIZES)
def test_a_sequential_that_loads_them_computes_what_the_experts_compute(name: str, to: str, size: int | None) -> None:
    experts = [module for module in make(name).modules() if hasattr(module, "is_transposed")][-1]
    activation = ops.ScaledClampedQGeGLU(size) if name == "gpt-oss" else ops.ScaledSwiGLU(size)
    about = {"stacked": to == "fuser", "bias": name == "gpt-oss"}
    layer = Sequential({
        "dispatch": ops.Dispatch(E),
        "fc1": ops.GroupedLinear(E, H, 2 * F, **about),
        "activation": activation,
        "fc2": ops.GroupedLinear(E, F, H, **about, scale_bias=about["bias"]),
        "combine": ops.Combine(),
    })  # fmt: skip
    state = {f"experts.{key}": value for key, value in experts.state_dict().items()}
    loaded = dict(convert(state, to, glu_interleave_size=size))
    layer.load_state_dict({key.removeprefix("experts."): value for key, value in loaded.items()})
    x, probs = torch.randn(7, H), torch.rand(7, 2)
    indices = torch.stack([torch.randperm(E)[:2] for _ in range(7)])
    assert_close({"y": layer(x, indices=indices, probs=probs)}, {"y": experts(x, indices, probs)}, GRADIENTS)


def test_names_of_the_linears_may_be_any() -> None:
    state = stacked(bias=False)
    for to, names in {"fuser": ("0", "2"), "te": ("linear_fc1", "linear_fc2")}.items():
        there = dict(convert(state, to, linears=names))
        assert f"{P}.{names[0]}.weight{'0' if to == 'te' else ''}" in there
        assert_same_bits(dict(convert(there, "hf", hf_layout="stacked", linears=names)), state)


def test_tensors_are_read_one_layer_after_the_other(tmp_path: Any) -> None:
    class Files(Mapping[str, Tensor]):
        """Reads a tensor at each access, and notes it."""

        def __init__(self, tensors: Mapping[str, Tensor]) -> None:
            self.tensors, self.read = tensors, []

        def __getitem__(self, name: str) -> Tensor:
            self.read.append(name)
            return self.tensors[name].clone()

        def __iter__(self) -> Iterator[str]:
            return iter(self.tensors)

        def __len__(self) -> int:
            return len(self.tensors)

    files = Files(dict(convert(stacked(bias=False), "hf")))
    pairs = convert(files, "fuser")
    assert not files.read
    name = ""
    while not name.endswith("layers.0.mlp.experts.fc1.weight"):
        name, _ = next(pairs)
    assert not any("layers.1" in read or "down_proj" in read for read in files.read)
    save_file(dict(pairs), tmp_path / "rest.safetensors")  # which takes no tensors that share memory


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "megatron"}, "to='megatron' and hf_layout='per_expert' were given"),
        ({"to": "hf", "hf_layout": "rows"}, "hf_layout='rows' were given"),
        ({"to": "te", "linears": ("a", "a")}, "linears is .* must be 2 different names"),
        ({"to": "hf", "hf_names": "w13"}, "hf_names is 'w13', but must be 3 different names"),
        ({"to": "te", "glu_interleave_size": 0}, "glu_interleave_size is 0, but must be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(stacked(bias=False), **arguments)


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


def test_states_that_cannot_be_converted_are_refused_at_once() -> None:
    state = stacked(bias=True)
    with pytest.raises(ValueError, match=r"There are no experts among the 1 names.*linears=\(\.\.\.\)"):
        convert({"mlp.gate.weight": torch.ones(2, 2)}, "te")
    one = dict(convert(state, "hf"))
    with pytest.raises(ValueError, match=rf"{P} lacks 1 of its 36 tensors.*\('up', 'weight', 3\)"):
        convert(without(one, f"{P}.3.up_proj.weight"), "te")
    with pytest.raises(ValueError, match=rf"{P} lacks 1 of its 24.*\('fc1', 'bias', 0\).*from all files"):
        convert(without(dict(convert(state, "te")), f"{P}.fc1.bias0"), "fuser")
    with pytest.raises(ValueError, match=r"\('fc2', 'weight', None\)"):
        convert(without(state, f"{P}.down_proj"), "fuser")
    with pytest.raises(ValueError, match="are the same experts twice, or in two layouts"):
        convert({**one, **state}, "te")
    for name in (f"{P}.0.gate_proj.weight_scale_inv", f"{P}.gate_up_proj_blocks"):
        with pytest.raises(ValueError, match=f"{name}' is no weight and no bias.*Dequantize them first"):
            convert({**one, name: torch.ones(1)}, "te")


def test_shapes_that_do_not_match_are_refused() -> None:
    state = stacked(bias=False)
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \[6, 48, 32\] and down_proj \[6, 24, 24\]"):
        dict(convert({**state, f"{P}.down_proj": torch.ones(E, F, F)}, "te"))
    one = dict(convert(state, "hf"))
    with pytest.raises(ValueError, match="have different shapes"):
        dict(convert({**one, f"{P}.3.up_proj.weight": torch.ones(F + 1, H)}, "te"))
    with pytest.raises(ValueError, match="48 rows of gate and up do not divide into pairs of runs of 5"):
        dict(convert(state, "te", glu_interleave_size=5))


def of_shapes(**changes: Any) -> dict[str, Tensor]:
    shapes = {"fc1.weight": (3, 12, 4), "fc1.bias": (3, 12), "fc2.weight": (3, 4, 6), "fc2.bias": (3, 4)} | {
        name.replace("_", "."): shape for name, shape in changes.items()
    }
    return {f"experts.{name}": torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("changes", [
    {"fc1_weight": (3, 11, 4)}, {"fc1_weight": (11, 4)}, {"fc2_weight": (2, 4, 6)}, {"fc2_weight": (3, 4, 7)},
    {"fc2_weight": (3, 5, 6)}, {"fc1_bias": (3, 11)}, {"fc2_bias": (2, 4)},
])  # fmt: skip
def test_shapes_that_do_not_match_are_refused_with_what_is_needed(changes: Any) -> None:
    dict(convert(of_shapes(), to="hf"))
    (name,) = (f"an {name.replace('_', ' ')} of shape" for name in changes)
    with pytest.raises(ValueError, match=name):
        dict(convert(of_shapes(**changes), to="hf"))


def test_gate_and_up_have_as_many_rows() -> None:
    named = {"gate_proj": (8, 4), "up_proj": (4, 4), "down_proj": (4, 6)}
    values = {f"experts.{i}.{name}.weight": torch.randn(shape) for i in range(3) for name, shape in named.items()}
    with pytest.raises(ValueError, match=r"different shapes: \[4, 4\], \[8, 4\]"):
        dict(convert(values, to="fuser"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_without_scales_are_refused(dtype: torch.dtype) -> None:
    values = {name: value.to(dtype) for name, value in of_shapes().items()}
    with pytest.raises(ValueError, match="these experts are quantized"):
        dict(convert(values, to="hf"))
