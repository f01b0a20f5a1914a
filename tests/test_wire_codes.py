"""Dispatch that sends codes in place of tokens: the bits of the layer that quantizes behind the transfer."""
# T tokens, H features, F expert features, E experts, n ranks

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.exchange import Transfers
from fuser import Sequential, autocast, checkpoint, count_casts, lora, ops
from fuser.distributed import Overlapped
from ops.codes_on_wire import choose_codes, pack, unpack
from recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from recipes.mxfp8 import MXFP8Quantizer
from recipes.recipe import Role
from recipes.registry import as_recipe
from recipes.tensors.formats import E4M3
from recipes.tensors.splits import Splits
from tests.ranks import on_ranks, quietly
from tests.reference import assert_same_bits
from tests.test_expert_parallel import (
    Batch,
    Case,
    batch,
    check_shares,
    random_case,
    same_everywhere,
    sentence,
    share_of,
    step,
    weight_gradients,
    whole,
)

SENT = ("fp8_block", "mxfp8", "fp8_rowwise")
VALUES = "tokens sent in the dtype of x: "
Named = dict[str, Tensor | None]


def layer_of(case: Case, send_codes: str, **settings: Any) -> Sequential:
    layer = share_of(whole(case, **settings), case, dist.group.WORLD, **settings)
    vars(layer[0])["send_codes"] = send_codes  # before the first plan
    return layer


def run_without_gradients(layer: Any, given: Batch) -> Named:
    with torch.no_grad():
        return {"y": layer(given.x, probs=given.probs, indices=given.indices)}


@contextmanager
def sent_rows() -> Iterator[list[Tensor]]:
    """What is given to all_to_all_single while this lasts, of two dimensions: tokens, or results."""
    found: list[Tensor] = []
    original = dist.all_to_all_single

    def record(output: Tensor, given: Tensor, *arguments: Any, **named: Any) -> Any:
        found.extend([given] if given.dim() == 2 and given.shape[1] > 8 else [])
        return original(output, given, *arguments, **named)

    dist.all_to_all_single = record
    try:
        yield found
    finally:
        dist.all_to_all_single = original


def check_without_gradients(case: Case, rank: int, recipe: Any, **settings: Any) -> None:
    """Codes are sent, and y has the bits of the layer that sends values, and of the unsharded one."""
    given = batch(case)
    own = given.of_rank(case, rank)
    with autocast(recipe):
        with sent_rows() as sent:
            mine = run_without_gradients(layer_of(case, "exact", **settings), own)
        assert sent[0].dtype == torch.uint8 and all(rows.dtype == case.dtype for rows in sent[1:])
        with sent_rows() as sent:
            assert_same_bits(mine, run_without_gradients(layer_of(case, "never", **settings), own))
        assert all(rows.dtype == case.dtype for rows in sent)
        check_shares(case, rank, run_without_gradients(whole(case, **settings), given), {}, mine)


def send_codes_without_gradients(rank: int, ranks: int, seeds: int) -> None:
    with quietly():
        tokens = (7, 0, 12, 1)[:ranks]
        for recipe in SENT:
            check_without_gradients(Case(tokens, 2 * ranks, 3, torch.bfloat16, features=(160, 32)), rank, recipe)
            check_without_gradients(Case((0,) * ranks, ranks, 1), rank, recipe)
        for seed in range(seeds):
            case = random_case(seed, ranks)
            case = case._replace(features=((32, 32), (50, 32), (129, 32), (16, 32))[seed % 4])
            options = ({}, {"path": "split"}, {"fusions": ()})[seed % 3]
            check_without_gradients(case, rank, SENT[seed // 2 % 3], **options)


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [(2, 0), pytest.param(2, 24, marks=pytest.mark.rest), pytest.param(4, 16, marks=pytest.mark.rest)],
)
def test_without_gradients_codes_are_sent_and_no_bit_changes(ranks: int, seeds: int, tmp_path: Path) -> None:
    on_ranks(send_codes_without_gradients, ranks, seeds, folder=tmp_path, ranks=ranks)


# ------------------------------------------------------------------------------------------------------------- training


def train_with_codes(rank: int) -> None:
    with quietly():
        case = Case((20, 13), 4, 2, torch.bfloat16, features=(160, 32))
        own = batch(case).of_rank(case, rank)

        def train(
            send_codes: str, recipe: Any, frozen: range = range(0), run: Any = None
        ) -> tuple[Named, list[Tensor]]:
            """frozen: ranks on which the experts are"""
            layer = layer_of(case, send_codes)
            layer.requires_grad_(rank not in frozen)
            with autocast(recipe), sent_rows() as sent:
                found = step(layer if run is None else lambda *a, **k: run(layer, *a, **k), own)
            return found | weight_gradients(layer), sent

        for recipe in SENT:
            expected, _ = train("never", recipe)
            # the experts' weights need the values, so these are sent, once; also if they do on one rank alone
            for frozen in (range(0), range(1)):
                found, sent = train("exact", recipe, frozen)
                assert_same_bits(
                    found, {name: found[name] if found[name] is None else t for name, t in expected.items()}
                )
                assert [rows.dtype for rows in sent] == [torch.bfloat16] * 4
            # frozen experts: codes, with gradients of x and of the probabilities
            expected, _ = train("never", recipe, range(2))
            found, sent = train("exact", recipe, range(2))
            assert_same_bits(found, expected)
            assert [rows.dtype for rows in sent] == [torch.uint8] + [torch.bfloat16] * 3
            # computed again in backward: first without gradients, and so as codes
            expected, _ = train("never", recipe)
            found, sent = train("exact", recipe, run=lambda f, *a, **k: checkpoint(f, *a, use_reentrant=False, **k))
            assert_same_bits(found, expected)

        for recipe in SENT:
            expected, _ = train("never", recipe)
            found, sent = train("always", recipe)
            assert [rows.dtype for rows in sent] == [torch.uint8] + [torch.bfloat16] * 3
            # all but the gradients of the weights that multiply the rows
            inexact = "grad of 1.weight"
            assert_same_bits(*({k: t for k, t in named.items() if k != inexact} for named in (found, expected)))
            error = (found[inexact] - expected[inexact]).double().square().mean().sqrt()
            assert error < 0.05 * expected[inexact].double().square().mean().sqrt()
            assert (error > 0) == (recipe == "fp8_rowwise"), "by other factors than powers of two"


@pytest.mark.rest
def test_training_sends_values_unless_the_experts_are_frozen(tmp_path: Path) -> None:
    on_ranks(train_with_codes, folder=tmp_path)


def sent_and_received(x: Tensor, quantizer: Any, splits: Splits) -> Any:
    rows, widths = pack(x, quantizer)
    return unpack(
        *[part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, 1)],
        quantizer.spec,
        splits,
        x.dtype,
    )


def half_step(values: Tensor, scale: Tensor) -> Tensor:
    """By how much rounding to E4M3 may change values: half of the last of 3 bits, or of the smallest number, 2^-9."""
    return values.abs() / 16 + scale / 1024


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling(), Float8RowwiseScaling()])
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 300.0])
def test_the_columnwise_copy_made_of_codes_is_within_two_roundings(recipe: Any, magnitude: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 160, dtype=torch.float64).exp().mul(torch.randn(300, 160)).mul(magnitude).to(torch.bfloat16)
    quantizer, splits = (
        recipe.quantizer(Role.INPUT),
        Splits.make(torch.tensor([130, 0, 170]), rows=300, device=x.device),
    )
    rows = sent_and_received(x, quantizer, splits)
    behind = quantizer.quantize_grouped(x, splits).rowwise
    for sent, made in ((rows.rowwise.codes, behind.codes), (rows.rowwise.scale_inv, behind.scale_inv)):
        assert sent.shape == made.shape and torch.equal(sent.view(torch.uint8), made.view(torch.uint8))
    received = rows.dequantize()
    made = quantizer.quantize_grouped(received, splits, rowwise=False, columnwise=True)
    bound = torch.zeros(300, 160, dtype=torch.float64)
    for copy, of, columnwise in ((rows, x, False), (made, received, True)):
        natural = copy.natural(columnwise=columnwise)
        scale = quantizer.spec.scale_rule.values(natural.scale_inv).double()
        for axis, each in enumerate(natural.block):
            size = (300, 160)[axis]
            scale = scale.repeat_interleave(each or size, axis)[(slice(None),) * axis + (slice(size),)]
        bound += half_step(of.double(), scale)
    bound += received.double().abs() * 2**-8  # the values of the codes are rounded to x's dtype
    error = (made.dequantize(columnwise=True).double() - x.double()).abs()
    assert (error <= bound * (1 + 2**-7)).all()
    assert (error > bound / 4).any()


# ------------------------------------------------------------------------------------------------ where values are sent


def words(layer: Any, recipe: Any = None, **settings: Any) -> str:
    line = next(line for line in layer.explain(recipe=recipe, **settings).splitlines() if "tokens sent" in line)
    return line[line.index("tokens sent") :]


def meet_reasons(rank: int) -> None:
    with quietly():
        case = Case((5, 9), 4, 2)
        own = batch(case).of_rank(case, rank)
        layer = layer_of(case, "exact")
        assert "codes with a scale for each 128 of them, in the dtype of x where the" in words(layer, "fp8_block")
        assert "E4M3 codes with a scale for each 32 of them" in words(layer, "mxfp8")
        assert "a scale for each row" in words(layer, "fp8_rowwise")
        assert "from which the copy for the experts' weight gradients" in words(layer_of(case, "always"), "mxfp8")
        row_scaled = NVFP4BlockScaling(row_scaled_activation=True)
        refused: dict[str, tuple[Any, Any]] = {
            "the recipe 'high_precision' does not quantize": ("bf16", layer),
            "x has one scale for all rows of a tensor or group": ("fp8_current", layer),
            "each expert has a scale of its own, but a token is sent once": (DelayedScaling(reduce_amax=False), layer),
            "x has one amax for all rows of a tensor or group": ("nvfp4", layer),
            "codes of E2M1 are not sent": (row_scaled, layer),
            "a scale for each 128x128 values, of several rows": (
                Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
                layer,
            ),
            "send_codes='never'": ("mxfp8", layer_of(case, "never")),
            "no GroupedLinear that takes codes follows": ("mxfp8", Sequential(layer[0], ops.Identity(), *layer[1:])),
        }
        for reason, (recipe, one) in refused.items():
            assert words(one, recipe).startswith(VALUES) and reason in words(one, recipe), words(one, recipe)
            with autocast(recipe), sent_rows() as sent:
                run_without_gradients(one, own)
            assert all(rows.dtype == torch.float32 for rows in sent)
        # an own recipe begins another pipeline, and an adapter multiplies the values
        layer[1].set_recipe("fp8_block")
        assert "no GroupedLinear" in words(layer, "mxfp8")
        with_adapter = layer_of(case, "exact")
        lora.add(with_adapter, rank=2, targets=["1"])
        assert "the adapter of LoRAGroupedLinear multiplies values" in words(with_adapter, "mxfp8")
        # halves of an Overlapped send values: the same bits
        parts = layer_of(case, "exact")
        assert VALUES + "between the halves" in words(Overlapped(*parts, microbatches=1), "mxfp8")
        with autocast("mxfp8"):
            overlapped = run_without_gradients(Overlapped(*parts, microbatches=1), own)
            assert_same_bits(overlapped, run_without_gradients(parts, own))
            # quantized already: dequantized before, as without a group
            again = [Sequential(ops.Quantize(), *layer_of(case, send)) for send in ("exact", "never")]
            assert_same_bits(*(run_without_gradients(one, own) for one in again))
            # weights in another dtype than x
            narrow = [layer_of(case, send).to(torch.bfloat16) for send in ("exact", "never")]
            assert_same_bits(*(run_without_gradients(one, own) for one in narrow))
            with count_casts():
                assert_same_bits(run_without_gradients(parts, own), overlapped)
        # ranks that differ
        differing = layer_of(case, "never" if rank else "exact")
        with autocast("mxfp8"):
            text = same_everywhere(sentence(lambda: run_without_gradients(differing, own)))
        assert "rank 1: send_codes=never, num_experts=" in text
        # a hook on one rank ends its pipeline there: all send values
        differing = layer_of(case, "exact")
        if rank == 0:
            differing[1].register_forward_hook(lambda *_: None)
        with autocast("mxfp8"), sent_rows() as sent:
            assert_same_bits(run_without_gradients(differing, own), overlapped)
        assert all(rows.dtype == torch.float32 for rows in sent)
        with pytest.raises(AttributeError):
            differing[0].send_codes = "never"
        with autocast(Float8RowwiseScaling(power_2_scale=bool(rank))):
            text = same_everywhere(sentence(lambda: run_without_gradients(parts, own)))
        assert text.count("Float32Scale") == 2


def test_explain_says_where_values_are_sent_and_why(tmp_path: Path) -> None:
    on_ranks(meet_reasons, folder=tmp_path)


def test_another_word_for_send_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="send_codes is 'fp8', but must be one of 'exact', 'never', 'always'"):
        ops.Dispatch(4, send_codes="fp8")
    with pytest.raises(ValueError, match="send_codes is 'always', but there is no group to send tokens in"):
        ops.Dispatch(4, send_codes="always")


# ---------------------------------------------------------------------------------------------------------- bytes, GPUs


def count_bytes(rank: int) -> None:
    with quietly():
        case = Case((48, 48), 4, 2, torch.bfloat16, routing="one rank", features=(256, 32))
        own = batch(case).of_rank(case, rank)
        for recipe, of_token in {"fp8_block": 256 + 8, "fp8_rowwise": 256 + 4, "mxfp8": 256 + 8}.items():
            sent = {}
            for send_codes in ("exact", "never"):
                layer = layer_of(case, send_codes)
                with autocast(recipe):
                    sent[send_codes] = Transfers.of(lambda layer=layer: run_without_gradients(layer, own)).bytes_sent
            # all tokens go to rank 1, once
            assert sent["never"] - sent["exact"] == (48 * (512 - of_token) if rank == 0 else 0)


@pytest.mark.rest
def test_bytes_of_a_token_are_its_codes_and_scales(tmp_path: Path) -> None:
    on_ranks(count_bytes, folder=tmp_path)


@pytest.mark.parametrize("recipe", SENT)
def test_a_row_that_arrives_alone_lies_in_memory_as_the_cast_lays_it(recipe: str) -> None:
    x, quantizer = torch.randn(1, 160, dtype=torch.bfloat16), as_recipe(recipe).quantizer(Role.INPUT)
    splits = Splits.make([0, 1], rows=1, device="cpu")
    sent = sent_and_received(x, quantizer, splits).rowwise
    made = quantizer.quantize_grouped(x, splits).rowwise
    assert sent.codes.stride() == made.codes.stride() and sent.scale_inv.stride() == made.scale_inv.stride()


def test_scales_that_lie_as_a_kernel_lays_them_are_packed() -> None:
    x, quantizer = torch.randn(300, 160, dtype=torch.bfloat16), Float8RowwiseScaling().quantizer(Role.INPUT)
    copy = quantizer.quantize(x, rowwise=True).natural()
    apart = copy._replace(scale_inv=torch.empty_strided((300, 1), (1, 300)).copy_(copy.scale_inv))
    packed, widths = pack(x, Given(apart))
    assert torch.equal(packed, pack(x, quantizer)[0]) and widths == (160, 4)
    filled, widths = pack(x, quantizer, 16)
    assert filled.shape == (300, 176) and widths == (160, 4)
    assert torch.equal(filled[:, :164], packed) and not filled[:, 164:].any()
    assert torch.equal(packed[:, 160:].contiguous().view(torch.float32), copy.scale_inv)


class Given:
    """A quantizer whose cast is this one."""

    def __init__(self, copy: Any) -> None:
        self.copy = copy

    def quantize(self, x: Tensor, *, rowwise: bool) -> Any:
        return self

    def natural(self) -> Any:
        return self.copy


class Clips(MXFP8Quantizer):
    """Casts one tensor otherwise than grouped rows."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> Any:
        return super().quantize(x.clamp(-1, 1), rowwise=rowwise, columnwise=columnwise)


def test_values_are_sent_where_a_quantizer_casts_one_tensor_in_its_own_way() -> None:
    layer, recipe = ops.GroupedLinear(2, 32, 32), CustomRecipe(lambda role: Clips(E4M3))
    assert choose_codes(layer, CustomRecipe(lambda role: MXFP8Quantizer(E4M3)), "exact").spec is not None
    sent = choose_codes(layer, recipe, "exact")
    assert sent.spec is None and "Clips quantizes rows otherwise than its spec says" in sent.words


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", SENT)
@pytest.mark.parametrize("features", [160, 257])
def test_what_arrives_is_what_the_kernel_makes_of_the_rows(recipe: str, features: int) -> None:
    x = torch.randn(300, features, device="cuda", dtype=torch.bfloat16)
    quantizer = as_recipe(recipe).quantizer(Role.INPUT)
    splits = Splits.make(torch.tensor([130, 0, 170], device="cuda"), rows=300, device=x.device)
    sent = sent_and_received(x, quantizer, splits).rowwise
    made = quantizer.quantize_grouped(x, splits).rowwise
    for got, expected in ((sent.codes, made.codes), (sent.scale_inv, made.scale_inv)):
        assert got.shape == expected.shape and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def send_codes_between_gpus(rank: int) -> None:
    case = Case((300, 0), 4, 2, torch.bfloat16, features=(256, 64))
    own = Batch(*(tensor.cuda() for tensor in batch(case).of_rank(case, rank)))
    for recipe in SENT:
        with autocast(recipe):
            found = [run_without_gradients(layer_of(case, send).cuda(), own) for send in ("exact", "never")]
        assert_same_bits(*found)


@pytest.mark.gpu2
def test_gpus_that_send_codes_have_the_bits_of_values(tmp_path: Path) -> None:
    on_ranks(send_codes_between_gpus, folder=tmp_path, backend="nccl")
