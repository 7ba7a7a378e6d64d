"""The benchmarks' own arithmetic: the registry, the work models, the statistics, reports and comparisons."""

import dataclasses
import functools
import gc
import itertools
import json
import multiprocessing
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    __main__ as command,
)
from benchmarks import (
    accumulation,
    compare,
    counts,
    gate,
    measure,
    overhead,
    registry,
    report,
    results,
    timing,
    trainer,
    training,
    weights,
    work,
    workloads,
)
from benchmarks.case import AMPKIT, SAME_LIST, TORCH, Aim, Case, Side, WrongAnswerError
from benchmarks.environment import Others, describe
from benchmarks.scaling import Scaling
from benchmarks.timing import Clocks, Sample, Spread

CPU = torch.device("cpu")


# --- timing, on clocks that say what they are told


class FakeClock:
    """Seconds that pass only when a job says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def job(self, *seconds: float) -> timing.Run:
        """A job that takes these times in turn, again and again."""
        taken = itertools.cycle(seconds)

        def run(calls: int) -> None:
            for _ in range(calls):
                self.now += next(taken)

        return run


def test_a_spread_is_the_median_and_values_that_occurred():
    assert Spread.of([5, 1, 2, 4, 3]) == Spread(3, 2, 4)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([*range(101)]) == Spread(50, 20, 80)
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_ratios_are_taken_round_by_round():
    """The machine slows down tenfold halfway: medians of times would mislead, pairwise ratios do not."""
    theirs = [Sample(t, t, t) for t in (1.0, 1.0, 10.0, 10.0, 10.0)]
    ours = [Sample(t / 2, t / 2, t * 2) for t in (1.0, 1.0, 10.0, 10.0, 10.0)]
    assert timing.ratios(ours, theirs) == Spread(0.5, 0.5, 0.5)
    assert timing.ratios(ours, theirs, "cpu") == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="5 samples beside 4"):
        timing.ratios(ours, theirs[1:])


def test_sides_take_turns_and_the_first_rotates():
    clock, order = FakeClock(), []

    def side(name: str, seconds: float) -> timing.Run:
        def run(calls: int) -> None:
            order.append(name)
            clock.now += seconds * calls

        return run

    runs = {"a": side("a", 1.0), "b": side("b", 2.0), "c": side("c", 3.0)}
    readied: list[str] = []
    found = timing.in_turns(
        runs, Clocks(clock, clock), calls=10, seconds=1e9, rounds=(1, 3), before={"b": lambda: readied.append("b")}
    )
    assert "".join(order) == "abcbcacab"
    assert readied == ["b"] * 3
    assert {name: [sample.wall for sample in samples] for name, samples in found.items()} == {
        "a": [1.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3,
    }


def test_the_time_given_bounds_the_rounds_but_never_below_the_least():
    clock = FakeClock()
    clocks = Clocks(clock, clock)
    count = lambda seconds, rounds: len(timing.in_turns(  # noqa: E731
        {"a": clock.job(1.0), "b": clock.job(1.0)}, clocks, seconds=seconds, rounds=rounds)["a"])
    assert count(0.0, (4, 100)) == 4
    assert count(20.0, (4, 100)) == 10
    assert count(1e9, (4, 100)) == 100


def test_host_time_ends_when_the_call_returns_and_wall_time_when_the_device_is_done():
    clock = FakeClock()

    def wait() -> None:
        clock.now += 5.0

    sample = timing.take(clock.job(1.0), 2, Clocks(clock, lambda: 0.0, wait))
    assert sample == Sample(wall=3.5, host=1.0, cpu=0.0)


def test_calls_double_until_a_sample_is_long_enough():
    clock = FakeClock()
    assert timing.calls_for(clock.job(1e-4), 1e-3, Clocks(clock, clock)) == 16
    assert timing.calls_for(clock.job(1.0), 1e-3, Clocks(clock, clock)) == 1


# --- work models, beside torch's own counter


def counted_flops(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    """FLOPs of forward and backward as torch counts them, with attention written out."""
    torch._C._set_mkldnn_enabled(False)     # the counter knows no fused LSTM layer, only what it is made of
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            workloads.loss_of(model(batch[0]), batch[1]).backward()
    finally:
        torch._C._set_mkldnn_enabled(True)
    return counted.get_total_flops()


TINY = {
    "digits": lambda: workloads.digits(4),
    "characters": lambda: workloads.characters(2, 8, 16, 2),
    "gpt": lambda: workloads.gpt("tiny", 16, 2, 2, 8, 32, 2),
    "resnet": lambda: workloads.resnet("tiny", 8, (1, 2, 2), 2, 64, 5),
    "vit": lambda: workloads.vit("tiny", 16, 2, 2, 2, 32, 8, 5),
    "lstm": lambda: workloads.lstm("tiny", 16, 2, 2, 5, 32),
}


@pytest.mark.parametrize("name", TINY)
def test_flop_models_are_what_torch_counts(name: str):
    workload = TINY[name]()
    (batch,) = workload.batches(1, torch.Generator().manual_seed(0))
    model = workload.build()
    assert len(batch[0]) == workload.samples
    assert counted_flops(model, batch) == workload.flops


def test_large_models_have_the_parameters_they_are_known_for():
    sizes = {}
    for case in training.large():
        assert isinstance(case, training.Training)
        if case.variant == trainer.Variant():
            with torch.device("meta"):
                sizes[case.name] = sum(p.numel() for p in case.workload().build().parameters())
    assert sizes == {
        "GPT-2 124M, bf16": 124_439_808, "ResNet-50, bf16": 25_557_032, "ViT-B, bf16": 86_567_656,
    }


def test_byte_models_add_up():
    """A step is 28 bytes of AdamW, 8 of each micro-batch, and 4 more to add each further gradient to what is there."""
    assert work.training_bytes(10) == 10 * 36
    assert work.training_bytes(10, 8) == 10 * (28 + 8 * 8 + 7 * 4)
    assert work.region_casts(10) == 60
    assert Scaling(name="", job="clip", tensors=3, elements=5).work() == work.Work(0, 180, "12 bytes per element")


# --- the registry


def test_names_are_unique_and_every_device_has_cases():
    cases = registry.every_case()
    assert len({(case.family, case.name) for case in cases}) == len(cases)
    assert {device for case in cases for device in case.devices} == {"cpu", "cuda"}
    families = {case.family for case in registry.choose("cpu")}
    assert families == {"operators", "regions", "weights", "scaler", "accumulation", "width", "training"}
    assert families <= set(report.TITLES)


def test_the_everyday_cpu_run_fits_in_five_minutes():
    """Timing takes its seconds, building and counting about as long again; the gate has a minute."""
    seconds = [case.seconds for case in registry.choose("cpu")]
    assert sum(seconds) <= 150


def test_patterns_choose_and_a_wrong_one_names_the_families():
    assert {case.family for case in registry.choose("cuda", ["width/*", "scaler/*"])} == {"width", "scaler"}
    assert [case.name for case in registry.choose("cuda", ["*/GPT-2*bf16 graph"])] == ["GPT-2 124M, bf16 graph"]
    with pytest.raises(ValueError, match="families are accumulation, operators"):
        registry.choose("cpu", ["nothing"])


@pytest.mark.parametrize("case", registry.every_case(), ids=lambda case: f"{case.family}/{case.name}")
def test_aims_are_between_sides_that_the_case_has(case: Case):
    for device in case.devices:
        if isinstance(case, training.Training):
            names = trainer.ways(case.variant, torch.device(device))
        elif isinstance(case, Scaling):
            small = dataclasses.replace(case, tensors=min(case.tensors, 2), elements=min(case.elements, 10))
            names = list(small.sides(CPU))
        else:
            names = list(case.sides(CPU))
        assert case.base in names
        assert all({aim.side, aim.base} <= {*names} for aim in case.aims)


# --- training


def tiny_case(variant: trainer.Variant, workload: Callable[[], workloads.Workload]) -> training.Training:
    return training.Training(name="tiny", variant=variant, workload=workload)


@pytest.mark.parametrize("name", TINY)
def test_every_way_trains_every_workload(name: str):
    """A few steps of each way: torch.amp's list gives torch.amp's loss to the bit, and fp32 is near."""
    case = tiny_case(trainer.Variant(), TINY[name])
    sides = case.sides(CPU)
    case.check(sides)
    losses = {way: side.result()[0].item() for way, side in sides.items()}
    assert losses[SAME_LIST] == losses[TORCH]
    assert losses["fp32"] == pytest.approx(losses[TORCH], rel=0.1)
    assert losses["fp32"] != losses[TORCH]


def test_all_ways_share_one_drawing_of_the_batches():
    """At full size it takes longer than training on them does."""
    drawn = []

    def workload() -> workloads.Workload:
        tiny = TINY["gpt"]()
        return dataclasses.replace(tiny, batches=lambda *given: (drawn.append(given), tiny.batches(*given))[1])

    tiny_case(trainer.Variant(), workload).sides(CPU)
    assert len(drawn) == 1


@pytest.mark.parametrize("variant", [
    trainer.Variant(torch.bfloat16, 8), trainer.Variant(torch.float16, 2, clip=True),
    trainer.Variant(torch.bfloat16, clip=True), trainer.Variant(torch.float16),
], ids=str)
def test_every_variant_trains(variant: trainer.Variant):
    case = tiny_case(variant, TINY["gpt"])
    sides = case.sides(CPU)
    case.check(sides)
    facts = sides[SAME_LIST].facts()
    assert facts["samples_per_step"] == 2 * variant.accumulation
    assert facts["peak_bytes"] > 0
    assert facts["launches"] is None


def test_a_kept_cache_casts_each_weight_once_per_step():
    """Counted: eight micro-batches save seven eighths of the casts of the 18 weights and biases in torch's list."""
    sides = tiny_case(trainer.Variant(torch.bfloat16, 8), TINY["gpt"]).sides(CPU)
    copies = {}
    for way in (TORCH, SAME_LIST, trainer.KEPT):
        sides[way].run(2)
        copies[way] = sides[way].facts()["copies"]
    n_weights = 2 * 4 * 2 + 1       # two blocks of four linears with biases; the tied head
    assert copies[SAME_LIST] == copies[TORCH]
    assert copies[TORCH] - copies[trainer.KEPT] == 7 * n_weights


def test_compiled_training_gives_eager_losses(monkeypatch: pytest.MonkeyPatch):
    """Without code generation, which takes half a minute; that part is torch's."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    losses = []
    for run in ("eager", "compiled"):
        one = trainer.Trainer(TINY["gpt"](), trainer.Variant(run=run), AMPKIT, CPU)
        one.step()
        one.step()
        assert one.loss is not None
        losses.append(one.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_accumulated_gradients_are_the_mean_over_micro_batches():
    """Beside one backward over all of the step's samples at once."""
    one = trainer.Trainer(TINY["gpt"](), trainer.Variant(accumulation=4, step=False), trainer.FP32, CPU)
    one.step()
    found = [param.grad.clone() for param in one.model.parameters() if param.grad is not None]
    inputs, targets = (torch.cat(parts) for parts in zip(*one.batches[:4], strict=True))
    one.model.zero_grad()
    workloads.loss_of(one.model(inputs), targets).backward()
    for mine, param in zip(found, one.model.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad)


def test_peaks_do_not_depend_on_what_was_counted_before():
    """The same way twice, counted in turns with another: three equal peaks."""
    sides = [tiny_case(trainer.Variant(), TINY["gpt"]).sides(CPU)[way] for way in (SAME_LIST, TORCH, SAME_LIST)]
    for side in sides:
        side.run(2)
    assert len({side.facts()["peak_bytes"] for side in (*sides, *sides)}) == 1


def test_sides_in_processes_of_their_own_train_alike_and_end():
    """Losses equal those of one process; an error in a child is told; the children are gone afterwards."""
    build = functools.partial(workloads.gpt, "tiny", 16, 2, 2, 8, 32, 2)
    case = accumulation.Apart(name="tiny", variant=trainer.Variant(torch.bfloat16, 2), workload=build)
    sides = case.sides(CPU)
    case.check(sides)
    (here,) = case.side(build(), TORCH, CPU).result()
    assert sides[TORCH].result()[0] == here
    assert sides[SAME_LIST].facts()["copies"] > sides[trainer.KEPT].facts()["copies"]
    with pytest.raises(RuntimeError, match=r"torch\.amp: KeyError: 'nonsense'"):
        sides[TORCH].run("nonsense")  # pyright: ignore[reportArgumentType]
    children = multiprocessing.active_children()
    assert len(children) == 3
    sides.clear()
    gc.collect()
    assert not any(child.is_alive() for child in children)


def test_graphs_and_unknown_ways_are_refused_with_a_reason():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        trainer.Trainer(TINY["gpt"](), trainer.Variant(run="graph"), AMPKIT, CPU)
    with pytest.raises(ValueError, match="unknown way 'magic'"):
        trainer.Trainer(TINY["gpt"](), trainer.Variant(), "magic", CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_graph_and_compiled_steps_train_as_eager_ones(dtype: torch.dtype):
    device = torch.device("cuda")
    for way in (TORCH, AMPKIT):
        losses = []
        for run in ("eager", "graph", "compiled"):
            one = trainer.Trainer(TINY["gpt"](), trainer.Variant(dtype, 2, clip=True, run=run), way, device)
            for _ in range(4):
                one.step()
            assert one.loss is not None
            losses.append(one.loss.item())
        assert losses[1:] == pytest.approx(losses[:1] * 2, rel=2e-2)


# --- counting and measuring


def test_copies_and_peaks_are_counted():
    """Two casts, of which the second lives on; a tensor of 4000 bytes that dies before them."""
    kept = []

    def job() -> None:
        torch.empty(1000)
        kept.append(torch.ones(250).bfloat16().double())

    job()
    assert counts.peak_and_copies(job, CPU) == {"peak_bytes": 4000, "copies": 2}
    assert counts.highest_sum([5, 10, -15, 8]) == 15
    assert counts.launches(job, CPU) is None


def test_weight_casts_are_counted():
    sides = weights.WeightCasts(name="", weights=3).sides(CPU)
    for side in sides.values():
        side.run(1)
    assert {name: side.facts()["casts"] for name, side in sides.items()} == {TORCH: 3, SAME_LIST: 3, weights.KEPT: 0}


@pytest.mark.parametrize("name", overhead.OPERATORS)
def test_operators_run_in_every_region(name: str):
    for side in overhead.Operator(name=name, operator=name).sides(CPU).values():
        side.run(2)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("way", overhead.WAYS)
def test_regions_are_opened_in_every_way(way: str):
    for side in overhead.Entering(name=way, way=way).sides(CPU).values():
        side.run(2)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("job", ["unscale", "clip", "clip + AdamW", "python"])
def test_scalers_agree_and_disagreement_is_seen(job: str):
    case = Scaling(name="tiny", job=job, tensors=3, elements=50)
    sides = case.sides(CPU)
    case.check(sides)
    if job == "python":
        return
    right = sides[AMPKIT].run

    def wrong(calls: int) -> None:
        right(calls)
        for tensor in sides[AMPKIT].result():
            tensor.add_(1e-3)

    sides[AMPKIT].run = wrong
    with pytest.raises(WrongAnswerError, match=r"tiny: ampkit left other values than torch\.amp"):
        case.check(sides)


def test_a_training_case_whose_losses_differ_is_not_timed():
    case = tiny_case(trainer.Variant(), TINY["digits"])
    sides = case.sides(CPU)
    sides[SAME_LIST].result = lambda: [sides[TORCH].result()[0] + 1e-6]
    with pytest.raises(WrongAnswerError, match="after 3 steps the loss of ampkit, torch's list is"):
        case.check(sides)


def sleepy_case(**options: Any) -> tuple[Case, Clocks]:
    """A case whose sides take 2 and 1 seconds on a clock of its own."""
    clock = FakeClock()

    class Sleepy(Case):
        def sides(self, device: torch.device) -> dict[str, Side]:
            return {TORCH: Side(clock.job(2.0)), AMPKIT: Side(clock.job(1.0), facts=lambda: {"casts": 3})}

        def work(self) -> work.Work:
            return work.Work(1e9, 1e9, "made up")

    case = Sleepy(family="training", name="sleepy", aims=(Aim(AMPKIT, 0.4), Aim("absent", 1.0)), **options)
    return case, Clocks(clock, clock)


def test_a_row_says_what_was_found():
    case, clocks = sleepy_case(seconds=20.0)
    row = measure.measure(case, CPU, clocks=clocks)
    half = {"median": 0.5, "low": 0.5, "high": 0.5}
    assert row["rounds"] == 7
    assert row["sides"][AMPKIT]["ratio"] == row["sides"][AMPKIT]["cpu_ratio"] == half
    assert row["sides"][TORCH]["wall"]["median"] == 2.0
    assert row["sides"][AMPKIT]["facts"] == {"casts": 3}
    assert row["aims"] == [{"side": AMPKIT, "limit": 0.4, "base": TORCH, "ratio": half}]
    assert row["work"] == {"flops": 1e9, "bytes": 1e9, "model": "made up"}
    elsewhere, clocks = sleepy_case(seconds=20.0, in_process=False)
    found = measure.measure(elsewhere, CPU, clocks=clocks)
    assert found["sides"][AMPKIT]["cpu_ratio"] is None
    assert found["other_cores"] is None
    with pytest.raises(ValueError, match=r"compared with 'nobody', which is none of torch\.amp, ampkit"):
        measure.measure(sleepy_case(base="nobody")[0], CPU, clocks=clocks)


def test_other_programs_are_noticed():
    """A child that computes for a while is seen; our own computing is not."""
    others = Others()
    with others.watched(), subprocess.Popen(["python3", "-c", "for _ in range(20_000_000): pass"]) as child:
        child.wait()
    if others.cores is None:
        pytest.skip("this system does not say how busy it is")
    assert others.cores > 0.3


# --- result files, reports, comparisons


def sample_row(name: str, ratio: float, width: float = 0.01, **more: Any) -> dict[str, Any]:
    """A row as `measure` makes it, with torch.amp at 2 ms and ampkit at `ratio` of it."""

    def side(factor: float, facts: dict[str, Any]) -> dict[str, Any]:
        spread = {"median": factor, "low": factor - width, "high": factor + width}
        times = {key: value * 2e-3 for key, value in spread.items()}
        return {"wall": times, "host": times, "cpu": times, "ratio": spread, "cpu_ratio": spread, "facts": facts}

    facts = {"final_loss": 0.25, "peak_bytes": 3 << 20, "copies": 7, "samples_per_step": 4, "launches": None}
    row = {
        "family": "training", "name": name, "base": TORCH, "device": "cpu", "rounds": 9, "calls": 1,
        "other_cores": 0.0, "size": None, "size_name": "", "work": {"flops": 4e6, "bytes": 1e6, "model": ""},
        "sides": {TORCH: side(1.0, facts), AMPKIT: side(ratio, facts)},
        "aims": [{"side": AMPKIT, "base": TORCH, "limit": 1.0, "ratio": side(ratio, {})["ratio"]}],
        "environment": {
            **describe(CPU), "gate": "all passed", "effort": 1.0, "device": "a machine", "commit": "abc", "dirty": True,
            "ceilings": {"memory_gb_per_s": 10.0, "float32_gflop_per_s": 4.0, "bfloat16_gflop_per_s": 8.0},
        },
    }
    return {**row, **more}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    for row in rows:
        results.append(path, row)
    return path


def test_results_come_back_from_a_file_and_strangers_are_refused(tmp_path: Path):
    path = write_rows(tmp_path / "results.jsonl", [sample_row("a", 0.123456789), sample_row("b", 1.0)])
    first, second = results.load(path)
    assert first["sides"][AMPKIT]["ratio"]["median"] == 0.123457
    assert results.key(second) == ("training", "b")
    for text, message in (("{", "line 1: not JSON"), ('{"a": 1}', "line 1: not a row"), ("", "holds no results")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            results.load(path)


def test_a_report_shows_figures_aims_losses_and_failures(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [sample_row("fast", 0.8), sample_row("slow", 1.2, other_cores=1.5)]
    rows += [sample_row(f"w{n}", 1.0, family="width", size=n, size_name="width") for n in (32, 64)]
    rows.append({"family": "training", "name": "broken", "error": "boom", "environment": rows[0]["environment"]})
    path = write_rows(tmp_path / "results.jsonl", rows)
    assert report.main([str(path)]) == 0
    text = (tmp_path / "report.md").read_text()
    for wanted in (
        "# ampkit beside torch.amp: a machine", "ampkit at abc with uncommitted changes", "all passed",
        "| training/fast | ampkit | torch.amp | 1.00 | 0.80 (0.79-0.81) | reached |",
        "| training/slow * | ampkit | torch.amp | 1.00 | 1.20 (1.19-1.21) | **missed** |",
        "| fast | torch.amp | 2 ms | 1.00 (0.99-1.01) | 1.00 | 2000 | 3 MiB | 7 | 0.2500 | 25% |",
        "## Not measured\n\n- training/broken: boom",
    ):
        assert wanted in text, wanted
    for name in ("ratios.png", "sizes.png", "roofline.png"):
        assert f"({name})" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert report.main([str(tmp_path / "absent.jsonl")]) == 1


def test_the_roof_is_the_larger_of_the_two_floors():
    """1e6 bytes at 10 GB/s are 0.1 ms, 4e6 FLOPs at 8 GFLOP/s are 0.5 ms."""
    row = sample_row("a", 1.0)
    assert report.under_roof(row, 1e-3) == pytest.approx(0.5)
    row["work"]["flops"] = 0
    assert report.under_roof(row, 1e-3) == pytest.approx(0.1)
    assert report.under_roof({**row, "work": None}, 1e-3) is None


def test_quantities_read_well():
    assert [report.duration(s) for s in (1.234e-6, 0.0456, 7.0)] == ["1.23 us", "45.6 ms", "7 s"]
    assert [report.amount(b) for b in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2 KiB", "3 MiB", "5 GiB"]


def test_a_comparison_finds_what_changed_beyond_its_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old = [sample_row("slower", 1.0), sample_row("faster", 1.0), sample_row("same", 1.0), sample_row("gone", 1.0)]
    old += [sample_row("noisy", 1.0, width=0.5), sample_row("little", 1.0, width=0.001)]
    new = [sample_row("slower", 1.3), sample_row("faster", 0.7), sample_row("same", 1.005), sample_row("fresh", 9.0)]
    new += [sample_row("noisy", 1.3, width=0.5), sample_row("little", 1.02, width=0.001)]
    verdicts = {change.case: change.verdict for change in compare.compare(old, new)}
    assert verdicts == {
        "training/slower": "slower", "training/faster": "faster", "training/same": "same", "training/noisy": "same",
        "training/little": "same",
    }
    files = [str(write_rows(tmp_path / name, rows)) for name, rows in (("old", old), ("new", new))]
    assert compare.main(files) == 0
    text = capsys.readouterr().out
    assert "| training/slower | ampkit | 1.00 (0.99-1.01) | 1.30 (1.29-1.31) | 1.30 |" in text
    assert "No longer measured: training/gone" in text
    assert "5 compared, 3 the same" in text
    assert compare.main([*files, "--fail"]) == 1
    assert compare.main([files[0], files[0], "--fail"]) == 0
    assert compare.main([str(tmp_path / "absent"), files[0]]) == 2


# --- the command


def test_a_red_gate_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    red = subprocess.CompletedProcess([], 1, "FAILED tests/test_x.py::test_y\n1 failed", "")
    monkeypatch.setattr(gate, "run_tests", lambda files: red)
    assert command.main(["regions/*", "--out", str(tmp_path)]) == 1
    assert "tests fail, so nothing is measured:\nFAILED tests/test_x.py::test_y" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_stops_a_run_before_its_first_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A folder that cannot be made is said before minutes of tests; Ctrl-C amid those leaves no traceback."""
    def interrupted(kind: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.gate, "pass_gate", interrupted)
    (tmp_path / "file").touch()
    assert command.main(["regions/*", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "--out: cannot write into" in capsys.readouterr().err
    assert command.main(["regions/*", "--out", str(tmp_path)]) == 130


def test_the_gate_runs_real_tests(tmp_path: Path):
    """Files that exist, and pytest's own verdict on one that fails."""
    from benchmarks.environment import ROOT

    assert all((ROOT / name).is_file() for name in gate.QUICK)
    failing = tmp_path / "test_red.py"
    failing.write_text("def test_red():\n    assert 1 == 2\n")
    assert gate.run_tests([str(failing)]).returncode == 1
    assert gate.pass_gate("none") == "no tests were run"
    with pytest.raises(ValueError, match="unknown gate 'maybe'"):
        gate.pass_gate("maybe")


def test_a_run_writes_results_and_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """One case that works and one that fails: the failure is shown, costs nothing else, and turns the status red."""
    case, _ = sleepy_case()
    broken, _ = sleepy_case(base="nobody")
    object.__setattr__(broken, "name", "broken")
    monkeypatch.setattr(command, "choose", lambda *_, **__: [case, broken])
    monkeypatch.setattr(command, "ceilings", lambda device: sample_row("", 1.0)["environment"]["ceilings"])
    assert command.main(["--gate", "none", "--effort", "0.01", "--out", str(tmp_path)]) == 1
    rows = results.load(tmp_path / "results.jsonl")
    assert [row["name"] for row in rows] == ["sleepy", "broken"]
    assert rows[1]["error"].startswith("ValueError: case 'broken'")
    assert {"torch", "python", "commit", "dirty", "device", "threads", "gate"} <= rows[0]["environment"].keys()
    assert json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0]) == rows[0]
    assert "no tests were run" in (tmp_path / "report.md").read_text()
    assert command.main(["--gate", "none", "--minutes", "0", "--out", str(tmp_path)]) == 0
    assert "out of time: 2 cases were not measured" in capsys.readouterr().out


def test_the_command_lists_cases_and_refuses_nonsense(capsys: pytest.CaptureFixture[str]):
    assert command.main(["--list", "width/*"]) == 0
    assert capsys.readouterr().out.split() == [f"width/d={width}" for width in (32, 64, 128, 256, 512)]
    assert command.main(["--list", "--large-first", "width/d=??"]) == 0
    assert capsys.readouterr().out.split() == ["width/d=64", "width/d=32"]
    assert command.main(["nothing"]) == 1
    assert command.main(["--effort", "0"]) == 1
    if not torch.cuda.is_available():
        assert command.main(["--device", "cuda"]) == 1
        assert "no CUDA device" in capsys.readouterr().err
