"""What graphs take from the device is said before anything is captured."""

import pytest
import torch

from fuser import Sequential, ops
from fuser.graph import make_graphed_callables
from fuser.graph.capture import RerunRecorder, gaps
from fuser.schedule.memory import Buffer, Taken
from tests import main_grad_cases as cases
from tests.recorded_ops import OpsLog

RECIPES = ["fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4"]
SCHEDULE = "F1 F1 B1 F1 B1 W1 B1 W1 W1"
GIB = 1 << 30


def experts(device="cpu", width=64, groups=4, **switches):
    settings = {"bias": False, "dtype": torch.bfloat16, "device": device, "delay_wgrad_compute": True, **switches}
    return Sequential(
        ops.GroupedLinear(groups, width, 4 * width, **settings),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(groups, 2 * width, width, **settings),
    )


def graphed(module, rows=96, width=64, groups=4, schedule=SCHEDULE, **options):
    device = next(module.parameters()).device
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16).requires_grad_()
    sizes = torch.full((groups,), rows // groups, device=device)
    extras = {"split_sizes": sizes, "scales": torch.rand(rows, device=device).requires_grad_()}
    return make_graphed_callables([module], [(x,)], sample_kwargs=[extras], schedule=schedule, **options)


class Compared(RerunRecorder):
    """Notes what takes memory where it is measured, and where it is recorded; a pool is said to have 3 GiB."""

    is_recording = False

    def __init__(self):
        super().__init__()
        self.measured, self.recorded, self.order = [], [], []

    def warm_up(self, work, *, rehearses=False):
        self.order.append("rehearsal" if rehearses else "warm-up")
        if not rehearses:
            return super().warm_up(work)
        with OpsLog() as log:
            super().warm_up(work, rehearses=True)
        self.measured.append(log.new_memory())

    def measure(self, run):
        run()
        return 3 * GIB

    def end_warm_up(self):
        self.order.append("end")

    def record(self, work):
        Compared.is_recording = True
        try:
            with OpsLog() as log:
                segment = super().record(work)
        finally:
            Compared.is_recording = False
        self.recorded.append(log.new_memory())
        self.order.append("record")
        return segment


@pytest.fixture
def recorder(monkeypatch):
    recorder = Compared()
    monkeypatch.setattr("fuser.graph.callables.make_recorder", lambda device, pool: recorder)
    monkeypatch.setattr("ops.products.weights.is_capturing", lambda device: Compared.is_recording)
    return recorder


@pytest.mark.parametrize(
    ("recipe", "kept", "main_grad"),
    [*[(recipe, False, False) for recipe in (None, *RECIPES)], ("mxfp8", True, False), ("mxfp8", True, True),
     ("fp8_delayed", True, False), (None, False, True)],
)  # fmt: skip
def test_the_last_warm_up_takes_memory_as_the_capture_does(recipe, kept, main_grad, recorder):
    module = experts(accumulate_into_main_grad=main_grad)
    cases.give_main_grads(module, 0.0)
    graphed(module, recipe=recipe, cache_quantized_params=kept, num_warmup_iters=2)
    assert len(recorder.recorded) == 9 and all(recorder.recorded[:6])
    for measured, recorded in zip(recorder.measured, recorder.recorded, strict=True):
        assert measured == recorded


@pytest.mark.parametrize("warmups", [2, 3])
def test_it_is_measured_last_and_said_before_the_capture(warmups, recorder):
    said = []

    def report(text):
        said.append(text)
        recorder.order.append("report")

    calls = graphed(
        experts(), num_warmup_iters=warmups, report=report, post_warmup_hook=lambda: recorder.order.append("hook")
    )
    passes = ["warm-up"] * 9 * (warmups - 1) + ["rehearsal"] * 9
    assert recorder.order == [*passes, "hook", "end", "report", *["record"] * 9]
    memory = calls[0].memory
    assert said == [memory.report()] and memory.taken.pool == 3 * GIB
    assert said[0].splitlines()[-1] == (
        f"the graphs take 3.0 GiB: {memory.taken.static / 1024:.1f} KiB for inputs, outputs and their gradients, "
        "and a pool of 3.0 GiB"
    )


@pytest.mark.parametrize("share", [False, True])
def test_what_stands_outside_of_the_pool_is_counted_as_it_is_shared(share):
    memory = graphed(experts(), share_buffers=share)[0].memory
    outside = [Buffer.INPUT, Buffer.OUTPUT, Buffer.OUTPUT_GRAD, Buffer.INPUT_GRAD]
    assert memory.taken == Taken(sum(map(memory.allocated if share else memory.unshared, outside)), None)
    assert memory.allocated(Buffer.OUTPUT_GRAD) < memory.unshared(Buffer.OUTPUT_GRAD)


@pytest.mark.parametrize("warmups", [0, 1])
def test_without_a_second_warm_up_the_pool_is_not_known(warmups, recorder):
    memory = graphed(experts(), num_warmup_iters=warmups)[0].memory
    assert memory.taken.pool is None and "rehearsal" not in recorder.order
    assert memory.report().endswith("a pool of a size not known: a GPU shows it, with 2 warm-ups or more")


def test_who_does_not_like_the_report_ends_the_call(recorder):
    def refuse(text):
        raise MemoryError(text)

    module = experts()
    with pytest.raises(MemoryError, match=r"a pool of 3\.0 GiB"):
        graphed(module, report=refuse)
    assert recorder.order[-1] == "end"
    graphed(module)


def test_gaps_are_what_the_allocator_would_hand_out():
    def segment(kind, *blocks):
        return {"segment_type": kind, "blocks": [{"size": size, "state": state} for size, state in blocks]}

    small = segment("small", (512, "inactive"), (1024, "active_allocated"), ((1 << 20) + 2048, "inactive"))
    large = segment("large", (1 << 20, "inactive"), (3 << 20, "active_allocated"), (2 << 20, "inactive"))
    # 1 MiB + 2 KiB at once would be taken from the large segment
    assert gaps([small, large]) == [2 << 20, 1 << 20, 2048, 512]


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, "fp8_delayed", "mxfp8"])
@pytest.mark.parametrize("options", [{}, {"cache_quantized_params": True}, {"clone_param_grads_on_return": False}],
                         ids=["", "kept weights", "owned gradients"])  # fmt: skip
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_the_pool_takes_what_the_report_said(recipe, options, delay):
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.empty_cache()
    module = experts("cuda", width=2048, groups=8, delay_wgrad_compute=delay)
    pool = torch.cuda.graph_pool_handle()
    schedule = SCHEDULE if delay else "F1 F1 B1 F1 B1 B1"
    before = []
    calls = graphed(
        module, rows=32768, width=2048, groups=8, recipe=recipe, schedule=schedule, pool=pool,
        report=lambda text: before.append(torch.cuda.memory_reserved()), **options,
    )  # fmt: skip
    taken = calls[0].memory.taken
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
    reserved = sum(segment["total_size"] for segment in segments)
    print(f"pool: {reserved} bytes reserved, {taken.pool} said")
    assert reserved > GIB
    assert taken.pool == pytest.approx(reserved, rel=0.02)
    assert torch.cuda.memory_reserved() - before[0] == pytest.approx(taken.pool, rel=0.02)
    calls[0].reset()


@pytest.mark.gpu
def test_what_warm_ups_took_is_given_back_before_the_capture():
    torch.utils.deterministic.fill_uninitialized_memory = False
    module = experts("cuda", width=2048, groups=8, accumulate_into_main_grad=True)
    cases.give_main_grads(module, 0.0)
    graphed(module, width=2048, groups=8)[0].reset()  # kernels, workspaces
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    held = []
    calls = graphed(
        module, rows=32768, width=2048, groups=8, report=lambda text: held.append(torch.cuda.memory_reserved())
    )
    static = calls[0].memory.taken.static
    assert held[0] - before < static + GIB // 2  # x, and no scratch of 512 MiB, or what passes took
    calls[0].reset()


@pytest.mark.gpu
def test_hundreds_of_captures_fit_into_a_process():
    module = Sequential(ops.Linear(16, 16, device="cuda"))
    x = torch.randn(4, 16, device="cuda").requires_grad_()
    for _ in range(300):  # see `CudaRecorder.unheld`
        make_graphed_callables([module], [(x,)], schedule="F1 B1", debug=True)[0].reset()
    assert module(x).isfinite().all()
