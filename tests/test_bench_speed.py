"""`bench speed`: what is wrong is never timed, figures add up, the limit has the FLOP it claims, the command runs."""

import json
import shutil
import sys
import types
from dataclasses import replace

import pytest
import torch

from bench import bench_speed, speed_report
from bench import wgrad as bench_wgrad
from bench.__main__ import main
from bench.bench_speed import MODELS, PARTS, START_MODEL, Job, Setup, checked_ways, jobs, run_jobs
from bench.case import PASSES
from bench.environment import gpu_state
from bench.grouped_case import expert_mlp
from bench.limit import limit_products, of_pass, products_sqnr, run_products
from bench.models import EXPERT_SHAPES, ExpertShape
from bench.peers import Peer, in_halves, in_turn, make_liger, make_sonicmoe, why_no_peer
from bench.routing import ROUTINGS, split_sizes, zipf_shares
from bench.speed_report import COMPILED, LIMIT, OURS, SPEED_MODELS, TARGETS, TORCH, Measured
from bench.sqnr import require_sqnr
from bench.start import measure_starts
from bench.timing import Timing, time_interleaved
from bench.wgrad import GRADIENT, MAIN_GRAD, wgrads, wgrads_sqnr, whole_steps, whole_steps_sqnr
from bench.whole_layer import route, whole_layer
from fuser import ops

SHAPE = ExpertShape(64, 32, num_experts=4, topk=2, tokens=32)


@pytest.fixture
def small(monkeypatch):
    """The CPU's default model, small enough for a test."""
    monkeypatch.setitem(MODELS, "cpu", SHAPE)


def setup(**options):
    return Setup(**{"device": "cpu", "rounds": 1, "routings": ["random", "skewed"], "limit": None} | options)


# --- the command


@pytest.mark.slow
def test_the_command_runs_end_to_end_and_writes_json_and_a_plot(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, plot = tmp_path / "speed.json", tmp_path / "plots" / "share.png"
    options = ["--device", "cpu", "--rounds", "2", "--json", str(path), "--plot", str(plot)]
    assert main(["speed", *options]) == 0
    printed = capsys.readouterr().out
    for needed in (
        "no GPU is used",
        "grouped MLP",
        "whole layer",
        "grouped MLP by routing",
        "weight gradients",
        "left out: host: a CPU",
    ):
        assert needed in printed
    assert "targets" not in printed
    record = json.loads(path.read_text())
    assert record["environment"]["torch"] == torch.__version__ and record["failed"] == [] and record["gpu"] == {}
    mlp = [one for one in record["measured"] if one["part"] == "mlp"]
    assert [(one["dtype"], one["routing"], one["passes"]) for one in mlp] == [
        (dtype, routing, passes) for dtype in ("bf16", "fp32") for routing in ("random", "skewed") for passes in PASSES
    ]
    for one in mlp:
        assert one["times"].keys() == one["sqnr"].keys() == {OURS, TORCH, LIMIT}
        assert one["rows"] == 64 and one["flop"] == (6 if one["passes"] == PASSES[0] else 18) * 64 * 64 * 32
        assert one["tflop_per_s"][OURS] == pytest.approx(one["flop"] / one["times"][OURS]["median"] / 1e12)
        share = one["tflop_per_s"][OURS] / one["tflop_per_s"][LIMIT]
        assert one["share_of_limit"][OURS] == pytest.approx(share)
    assert {one["part"] for one in record["measured"]} == {"mlp", "layer", "skew", "wgrad"}
    assert plot.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--parts", "mlp,speed"], "--parts speed is unknown. Take mlp, host, layer, skew, wgrad, start"),
        (["--models", "gpt-5"], "--models gpt-5 is unknown. Take cpu, qwen3-30b-a3b"),
        (["--dtype", "fp7"], "--dtype fp7 is unknown. Take bf16, fp32"),
        (["--against", "torch,eager"], "--against eager is unknown. Take torch, torch compiled, SonicMoE, Liger"),
        (["--routings", "even"], "--routings even is unknown. Take uniform, random, skewed"),
        (["--tokens", "0"], "--tokens 0 is no number of tokens"),
        (
            ["--models", "6x64x32x2", "--tokens", "16"],
            "--tokens 16: 32 rows of 6x64x32x2 cannot be divided",
        ),
        (["--rounds", "0"], "--rounds is 0, but must be at least 1"),
    ],
)
def test_a_wrong_call_is_a_sentence(options, sentence, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["speed", "--device", "cpu", *options])
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err


def test_without_time_everything_is_left_out_and_said(small, capsys):
    assert main(["speed", "--device", "cpu", "--parts", "mlp,skew", "--limit", "0"]) == 0
    printed = capsys.readouterr().out
    assert "no time was left for 3 of 3 comparisons: mlp of cpu, 32 tokens, bf16; mlp of cpu" in printed
    assert "median ms" not in printed


def test_what_matters_most_comes_first():
    todo = jobs(list(PARTS), ["qwen3-30b-a3b", "deepseek-v3-ep8"], ["model", "8192", "32768"], ["bf16"])
    own = {"qwen3-30b-a3b": 8192, "deepseek-v3-ep8": 16384}
    assert [(job.part, job.model) for job in todo[:2]] == [("mlp", model) for model in own]
    late = [job for job in todo if job.urgency]
    assert todo[-len(late) :] == late
    assert [(job.part, job.tokens) for job in late] == [("mlp", 32768), ("mlp", 8192), ("mlp", 32768)]
    assert len(set(todo)) == len(todo) == 2 * 5 + 1 + 3, "each once: 8192 is the own number of one model"
    assert [job.model for job in todo if job.part == "start"] == [START_MODEL]


# --- what is wrong is never timed


def never(*_, **__):
    raise AssertionError("timed")


@pytest.mark.parametrize("part", ["mlp", "layer", "skew"])
def test_a_wrong_operation_is_refused_before_timing(part, small, monkeypatch):
    """And the next job runs."""
    monkeypatch.setattr(ops, "ScaledSwiGLU", ops.ScaledClampedQGeGLU)
    monkeypatch.setattr(bench_speed, "time_interleaved", never)
    here, kept = setup(), []
    assert run_jobs([Job(part, "cpu", 32, "bf16", 0)] * 2, here, lambda found: kept.append(len(found))) == []
    assert len(here.failed) == 2 and kept == [0, 0]
    assert all(f"{part} of cpu, 32 tokens, bf16" in failed and "dB against fp32" in failed for failed in here.failed)


def test_a_wrong_weight_gradient_is_refused_before_timing(small, monkeypatch):
    product = bench_wgrad.grouped_gemm_nt
    monkeypatch.setattr(bench_wgrad, "grouped_gemm_nt", lambda *args, **options: product(*args, **options).mul_(1.1))
    monkeypatch.setattr(bench_speed, "time_interleaved", never)
    with pytest.raises(AssertionError, match="bf16 gradient: FC1 wgrad has 20.* dB"):
        list(PARTS["wgrad"]("cpu", 32, "bf16", setup()))


def test_a_failed_check_is_the_exit_code(small, monkeypatch, capsys):
    monkeypatch.setattr(ops, "ScaledSwiGLU", ops.ScaledClampedQGeGLU)
    assert main(["speed", "--device", "cpu", "--parts", "skew"]) == 1
    assert "FAILED: skew of cpu, 32 tokens, bf16: uniform: y has" in capsys.readouterr().out


class WrongWithoutGradients(ops.ScaledSwiGLU):
    def fuser_forward(self, ctx, x, extras):
        y, made = super().fuser_forward(ctx, x, extras)
        return (y if ctx.needs_grad else 1.1 * y), made


def test_forward_alone_is_checked_too(monkeypatch):
    monkeypatch.setattr(ops, "ScaledSwiGLU", WrongWithoutGradients)
    case = whole_layer(SHAPE)
    require_sqnr("layer", case.sqnr(case.step(case.ours(), PASSES[1])()), 40)
    with pytest.raises(AssertionError, match="ours: y has 20.* dB against fp32"):
        checked_ways(case, {OURS: case.ours()}, "bf16")


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("routing", ["random", "skewed"])
def test_a_wrong_tensor_of_the_layer_is_found(routing, index):
    case = whole_layer(SHAPE, routing=routing)
    found = [tensor.clone() for tensor in case.step(case.ours(), PASSES[1])()]
    require_sqnr("layer", case.sqnr(found), 40)
    found[index][-1] += found[index].abs().max()
    with pytest.raises(AssertionError, match=f"layer: {case.names[index]} has .* dB against fp32"):
        require_sqnr("layer", case.sqnr(found), 40)


def broken(case):
    raise TypeError("no such argument")


def peer_as_ours(case):
    return Peer(case.ours(), (case.inputs["x"], *case.weights))


def test_a_peer_that_fails_is_left_out_and_the_others_are_measured(small):
    here, kept = setup(routings=["random"]), []
    here.peers |= {"Broken": broken, "Sound": peer_as_ours}
    found = run_jobs([Job("layer", "cpu", 32, "bf16", 0)], here, lambda now: kept.append([[*one.times] for one in now]))
    assert [one.passes for one in found] == [*PASSES]
    assert all(one.times.keys() == one.sqnr.keys() == {OURS, TORCH, "Sound"} for one in found)
    assert here.left_out == ["Broken on cpu: TypeError: no such argument"] and here.failed == []
    assert kept[1] == [[OURS, TORCH]] * 2, "ours is known before a peer is tried"


def test_a_peer_that_fails_late_costs_no_figure(small, monkeypatch):
    here = setup(routings=["random"])
    here.peers["Late"] = peer_as_ours
    timed = time_interleaved

    def refusing(steps, **options):
        if "Late" in steps:
            raise RuntimeError("out of memory")
        return timed(steps, **options)

    monkeypatch.setattr(bench_speed, "time_interleaved", refusing)
    found = run_jobs([Job("layer", "cpu", 32, "bf16", 0)], here, lambda _: None)
    assert [one.times.keys() == one.sqnr.keys() == {OURS, TORCH} for one in found] == [True, True]
    assert here.left_out == ["Late on cpu: RuntimeError: out of memory"] and here.failed == []


def test_only_the_candidates_asked_for_are_measured(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_speed.PEERS, "Nobody", ("no_such_module", None))
    here = setup(against=["Nobody"])
    here.find_peers()
    assert here.left_out[0] == "Nobody: no_such_module is not installed." and len(here.left_out) == 2
    path = tmp_path / "speed.json"
    options = ["--parts", "layer", "--routings", "random", "--against", "SonicMoE", "--json", str(path)]
    assert main(["speed", "--device", "cpu", *options]) == 0
    assert [[*one["times"]] for one in json.loads(path.read_text())["measured"]] == [[OURS]] * 2
    assert "measured: layer, cpu, 32 tokens, bf16, random, forward: ours " in capsys.readouterr().out


# --- the limit


@pytest.mark.parametrize("name", SPEED_MODELS)
def test_the_limit_has_the_flop_of_the_formula(name):
    shape = EXPERT_SHAPES[name]
    case = expert_mlp(replace(shape, hidden=shape.hidden // 32, intermediate=shape.intermediate // 32, tokens=512))
    products = limit_products(case)
    full = case.rows * (shape.hidden // 32) * (shape.intermediate // 32)
    assert sum(product.flop for product in products) == case.flop_of(PASSES[1]) == 18 * full
    assert sum(product.flop for product in of_pass(products, PASSES[0])) == case.flop_of(PASSES[0]) == 6 * full
    assert all((tokens * shape.topk) % shape.num_experts == 0 for tokens in (8192, 16384, 32768))


def test_the_products_of_the_limit_are_right_and_run():
    products = limit_products(expert_mlp(SHAPE))
    found = products_sqnr(products)
    assert list(found) == ["FC1", "FC2", "FC2 dgrad", "FC1 dgrad", "FC2 wgrad", "FC1 wgrad"]
    assert min(found.values()) > 40
    run_products(products)
    of_group = {product.name: (*product.left.shape[1:], product.right.shape[2]) for product in products}
    m, h, f = 16, SHAPE.hidden, SHAPE.intermediate
    assert of_group["FC1"] == (m, h, 2 * f) and of_group["FC2"] == (m, f, h)
    assert of_group["FC2 dgrad"] == (m, h, f) and of_group["FC1 dgrad"] == (m, 2 * f, h)
    assert of_group["FC2 wgrad"] == (h, m, f) and of_group["FC1 wgrad"] == (2 * f, m, h)


def test_rows_that_cannot_be_equal_are_refused():
    with pytest.raises(ValueError, match="66 rows cannot be divided equally among 4 experts"):
        limit_products(expert_mlp(SHAPE, tokens=33))


# --- the cases


@pytest.mark.parametrize("routing", ROUTINGS)
def test_split_sizes_sum_to_the_rows(routing):
    sizes = split_sizes(32, 2048, routing)
    assert len(sizes) == 32 and sum(sizes) == 2048 and min(sizes) >= 0
    assert sizes.count(0) == (2 if routing == "skewed" else 0)
    assert (len(set(sizes)) == 1) == (routing == "uniform")


def test_zipf_shares_are_powers_of_ranks_in_another_order():
    shares = zipf_shares(8).tolist()
    assert sorted(shares, reverse=True) == pytest.approx([*(rank**-1.2 for rank in range(1, 8)), 0])
    assert shares != sorted(shares, reverse=True)


@pytest.mark.parametrize("routing", ["random", "skewed"])
def test_both_layers_are_right_and_route_as_asked(routing):
    case = whole_layer(replace(SHAPE, num_experts=16, tokens=256), routing=routing)
    for call in (case.ours(), case.torchs()):
        require_sqnr("layer", case.sqnr(case.step(call, PASSES[1])()), 40)
    _, indices = route(case.inputs["x"], case.weights[0], case.topk)
    counts = indices.flatten().bincount(minlength=16)
    assert counts.sum() == 512 and (counts.min() == 0) == (routing == "skewed")
    assert (counts.max() > 3 * counts.float().mean()) == (routing == "skewed")
    assert case.flop_of(PASSES[1]) == 18 * 512 * SHAPE.hidden * SHAPE.intermediate


def test_fp32_is_held_against_float64():
    case = expert_mlp(SHAPE, dtype=torch.float32)
    found = case.step(case.ours("bf16"), PASSES[1])()
    assert min(case.sqnr(found).values()) > 100
    found[0] = found[0].bfloat16().float()
    assert case.sqnr(found)["y"] < 60


def test_accumulated_weight_gradients_are_right_and_what_overwrites_is_found(monkeypatch):
    products = wgrads(expert_mlp(SHAPE, routing="skewed"))
    found = wgrads_sqnr(products)
    assert found.keys() == {GRADIENT, MAIN_GRAD} and min(min(of.values()) for of in found.values()) > 40
    monkeypatch.setattr(type(products[0]), "accumulated", lambda self: self.main_grad.copy_(self.new()))
    assert max(wgrads_sqnr(products)[MAIN_GRAD].values()) < 10


def test_whole_steps_write_or_add_their_weight_gradients():
    case = expert_mlp(SHAPE, routing="skewed")
    steps = whole_steps(case)
    found = whole_steps_sqnr(case, steps)
    assert found.keys() == {GRADIENT, MAIN_GRAD} and min(min(of.values()) for of in found.values()) > 40
    once = [dw.clone() for dw in steps[MAIN_GRAD]()[-2:]]
    assert all(weight.grad is None for weight in case.weights), "they are added, not written"
    assert all(torch.equal(twice, 2 * dw) for twice, dw in zip(steps[MAIN_GRAD]()[-2:], once, strict=True))
    written = steps[GRADIENT]()[-2:]
    for dw, w in zip(once, written, strict=True):
        assert w.dtype == torch.bfloat16
        # On CPUs with AMX a product that is rounded adds in another order: 1 of 8192 numbers is another's neighbour.
        torch.testing.assert_close(w, dw.bfloat16(), rtol=2.0**-7, atol=0)
        assert (w != dw.bfloat16()).sum() <= w.numel() / 1000


# --- peers, by stand-ins that have the signatures we call


def test_layouts_of_peers_are_undone():
    weight = torch.arange(2 * 6 * 3).view(2, 6, 3)
    assert in_turn(weight)[0, :, 0].tolist() == [0, 9, 3, 12, 6, 15]
    assert torch.equal(in_halves(in_turn(weight)), weight)


def test_a_peer_that_is_not_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(bench_speed.PEERS, "Nobody", ("no_such_module", None))
    assert why_no_peer("Nobody") == "no_such_module is not installed."


@pytest.mark.parametrize("routing", ["random", "skewed"])
def test_sonicmoe_gets_our_weights_interleaved_and_its_mode(routing, monkeypatch):
    case, modes = whole_layer(SHAPE, routing=routing), []

    def layer(x, router_w, w1, b1, w2, b2, K, stream_id, activation_type, is_inference_mode_enabled=False):
        assert (b1, b2, K, stream_id, activation_type) == (None, None, SHAPE.topk, 0, "swiglu")
        assert w1.shape == (2 * SHAPE.intermediate, SHAPE.hidden, SHAPE.num_experts) and w1.stride(1) == 1
        assert w2.shape == (SHAPE.hidden, SHAPE.intermediate, SHAPE.num_experts) and w2.stride(1) == 1
        modes.append(is_inference_mode_enabled)
        probs, indices = route(x, router_w, K)
        y = torch.zeros_like(x)
        for slot in range(K):
            h = torch.einsum("th,fht->tf", x, w1[..., indices[:, slot]])
            act = torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2] * probs[:, slot, None]
            y = y + torch.einsum("tf,hft->th", act.to(x.dtype), w2[..., indices[:, slot]])
        return y, None, None

    sonicmoe, enums = types.ModuleType("sonicmoe"), types.ModuleType("sonicmoe.enums")
    sonicmoe.moe_TC_softmax_topk_layer = layer
    enums.ActivationType = types.SimpleNamespace(SWIGLU="swiglu")
    monkeypatch.setitem(sys.modules, "sonicmoe", sonicmoe)
    monkeypatch.setitem(sys.modules, "sonicmoe.enums", enums)
    peer = make_sonicmoe(case)
    for passes in PASSES:
        found = peer.sqnr(case, peer.step(case, passes)())
        require_sqnr("SonicMoE", found, 30)
    assert list(found) == case.names and modes == [True, False]


def test_liger_gets_our_weights_and_routing(monkeypatch):
    case = whole_layer(SHAPE)

    class Function:
        @staticmethod
        def apply(x, fc1, fc2, indices, probs):
            y = torch.zeros_like(x)
            for slot in range(indices.shape[1]):
                gate, up = torch.einsum("th,tfh->tf", x, fc1[indices[:, slot]]).chunk(2, -1)
                act = torch.nn.functional.silu(gate) * up * probs[:, slot, None]
                y = y + torch.einsum("tf,thf->th", act, fc2[indices[:, slot]])
            return y

    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", types.ModuleType("liger_kernel.ops"))
    module = types.ModuleType("liger_kernel.ops.fused_moe")
    module.LigerFusedMoEFunction = Function
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", module)
    peer = make_liger(case)
    require_sqnr("Liger", peer.sqnr(case, peer.step(case, PASSES[1])()), 30)


# --- figures


def measured(**fields):
    times = {OURS: Timing(2.0, 1.0, 3.0), TORCH: Timing(3.0, 3.0, 3.0), COMPILED: Timing(2.5, 2.5, 2.5)}
    base = Measured(
        "mlp", "qwen3-30b-a3b", "bf16", 8192, 65536, 128, "random", PASSES[1], 10**12,
        times | {LIMIT: Timing(1.8, 1.8, 1.8)},
    )  # fmt: skip
    return replace(base, **fields)


def test_rates_ratios_and_shares_by_hand():
    one = measured()
    assert one.rows_per_expert == 512 and one.tflop_per_s(OURS) == 0.5
    assert one.over(OURS, TORCH) == 1.5 and one.share_of_limit[OURS] == pytest.approx(0.9)
    assert LIMIT not in one.share_of_limit


def test_targets_say_what_was_reached_and_what_was_missed(capsys):
    def found(**of_ours):
        return [measured(model=model) for model in ("qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-120b")] + [
            measured(part="layer", **of_ours),
            measured(part="skew", times={"skewed": Timing(1, 1, 1), "uniform": Timing(0.96, 1, 1)}),
            measured(part="wgrad", times={GRADIENT: Timing(1, 1, 1), MAIN_GRAD: Timing(1.1, 1, 1)}, num_experts=32),
            measured(part="wgrad", times={GRADIENT: Timing(1, 1, 1), MAIN_GRAD: Timing(9, 1, 1)}, passes="wgrad"),
        ]

    speed_report.show_targets(found())
    lines = {line.split("  ")[1]: line.split()[-4:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines["MLP over compiled torch: the others"] == ["1.250", "1.2", "1.28", "reached"]
    assert lines["MLP, share of the limit, 512 rows an expert"] == ["0.900", "0.84", "0.9", "stretch"]
    assert lines["layer over torch: qwen3, olmoe"] == ["1.250", "1.5", "1.65", "missed"]
    assert lines["rate under skewed over uniform routing"] == ["0.960", "0.95", "0.98", "reached"]
    assert lines["step with main_grad over bf16, from 2048 rows on"] == ["1.100", "1.05", "1.02", "missed"]
    assert "step with main_grad over bf16, 512 rows" not in lines, "those are the products alone"
    assert "MLP over compiled torch: mixtral" not in lines, "nothing was measured for it"


def test_targets_need_no_peer_that_was_not_measured():
    for part in ("layer", "mlp"):
        for others in ({}, {"SonicMoE": Timing(3, 3, 3)}):
            alone = measured(part=part, times={OURS: Timing(2, 2, 2), **others})
            names = [one["name"] for one in speed_report.reached_targets([alone])]
            assert not any("over" in name for name in names), names
    both = measured(part="layer", times={OURS: Timing(2, 2, 2), TORCH: Timing(3, 3, 3)})
    over_torch, *_ = speed_report.reached_targets([both])
    assert (over_torch["name"], over_torch["found"]) == ("layer over torch: qwen3, olmoe", 1.5)


def test_nothing_to_draw_is_no_warning(tmp_path):
    pytest.importorskip("matplotlib")
    assert speed_report.draw_share_of_limit(tmp_path / "empty.png", []).exists()


def test_other_routings_and_forward_alone_are_no_target():
    mlp = [target for target in TARGETS if target.wanted(measured())]
    assert len(mlp) == 2
    for other in (
        measured(routing="skewed"),
        measured(routing="uniform"),
        measured(passes=PASSES[0]),
        measured(dtype="fp32"),
    ):
        assert not any(target.wanted(other) for target in TARGETS)


# --- clocks


@pytest.mark.parametrize("clock", ["step", "device", "host"])
def test_every_clock_takes_turns_on_a_cpu(clock):
    order = []
    times = time_interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, clock=clock)
    assert len(order) == 2 * 7 and all(timing.median > 0 for timing in times.values())


@pytest.mark.gpu
def test_the_clocks_of_a_gpu_show_what_they_say():
    x = torch.randn(4096, 4096, device="cuda")
    step = {"product": lambda: [x @ x for _ in range(20)]}
    seconds = {clock: time_interleaved(step, rounds=5, device="cuda", clock=clock)["product"].median
               for clock in ("step", "device", "host")}  # fmt: skip
    assert seconds["host"] < 0.5 * seconds["device"] and seconds["device"] == pytest.approx(seconds["step"], rel=0.3)


@pytest.mark.gpu
def test_the_state_of_a_gpu_has_its_clocks():
    if shutil.which("nvidia-smi") is None:
        pytest.skip("there is no nvidia-smi")
    assert gpu_state()["clocks.sm"].endswith("MHz")


@pytest.mark.slow
def test_starts_are_measured_in_processes_of_their_own(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    starts = measure_starts("tiny-olmoe-1b-7b", device="cpu", timeout=120)
    assert starts.keys() == {"cold", "warm"} and all(abs(seconds) < 60 for seconds in starts.values())


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="(?s)bench.start gpt-5 cpu ended with 1: .*KeyError: 'gpt-5'"):
        measure_starts("gpt-5", device="cpu", timeout=120)


@pytest.mark.gpu
def test_a_warm_start_is_faster_than_a_cold_one():
    starts = measure_starts(START_MODEL, timeout=300)
    assert 0 < starts["warm"] < starts["cold"]


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # torch.compile's, of the router
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning")
@pytest.mark.gpu
def test_the_command_runs_on_a_gpu(tmp_path, capsys):
    path = tmp_path / "speed.json"
    options = ["--models", "tiny-olmoe-1b-7b", "--tokens", "model", "--rounds", "2", "--json", str(path)]
    assert main(["speed", "--parts", "mlp,host,layer,skew,wgrad", *options]) == 0
    record = json.loads(path.read_text())
    assert record["failed"] == [] and record["gpu"] and COMPILED in record["measured"][0]["times"]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "make"), [("SonicMoE", make_sonicmoe), ("Liger", make_liger)])
def test_a_peer_agrees_with_the_layer(name, make):
    if missing := why_no_peer(name):
        pytest.skip(missing)
    case = whole_layer(replace(SHAPE, hidden=512, intermediate=256, num_experts=8, tokens=1024), device="cuda")
    peer = make(case)
    require_sqnr(name, peer.sqnr(case, peer.step(case, PASSES[1])()), 20)
