"""examples/pretrain.py survives: ranks are killed, ended by SIGTERM and changed in number, and the run ends the same.

`stress/test_kills.py` has every precision by every point, at random steps, in `make soak`.
"""

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("forks ranks and sends them signals", allow_module_level=True)

import torch.distributed.checkpoint as dcp

from examples import pretrain
from tests.helpers.equal import assert_equal
from tests.helpers.killed_runs import SMALL, Job, Kill, start
from tests.helpers.paths import ROOT

# Each of the points but "after the update", where SIGTERM strikes below. "write" and "metadata" are in `async_save`.
KILLS = {
    ("fp16", "fsdp"): (Kill(2, 0, "agreement"), Kill(4, 1, "write"), Kill(5, 0, "forward")),
    ("bf16", "ddp"): (Kill(1, 1, "before the step"), Kill(3, 1, "backward"), Kill(4, 0, "metadata")),
    ("remainder", "fsdp"): (Kill(3, 0, "after the step"), Kill(4, 0, "write")),
}


Whole = Callable[[str, str], tuple[Path, dict[str, str]]]


def complete(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("step-*/.metadata"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Run a precision without an interruption. Returns the folder and the last line."""

    @functools.cache
    def run(precision: str, parallel: str) -> tuple[Path, dict[str, str]]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, start(Job(folder, precision, parallel)).state

    return run


@pytest.mark.parametrize(("precision", "parallel"), KILLS)
def test_a_killed_run_ends_as_an_uninterrupted_one(tmp_path: Path, whole: Whole, precision: str, parallel: str) -> None:
    folder, expected = whole(precision, parallel)
    job = Job(tmp_path / "killed", precision, parallel)
    for kill in KILLS[precision, parallel]:
        codes = start(job, kills=(kill,)).codes
        assert codes[kill.rank] == -signal.SIGKILL, f"{kill} did not take place: {codes}"
        assert codes[1 - kill.rank] == 1, "the other rank ends with an error"
    (job.folder / "step-9").mkdir()
    (job.folder / "step-9" / "__0_0.distcp").write_bytes(b"half of the data")
    assert start(job).state == expected
    assert complete(job.folder) == ["step-4", "step-6"]
    assert not (job.folder / "step-9").exists()
    lines = [(path / "metrics.jsonl").read_text() for path in (folder, job.folder)]
    assert lines[0] == lines[1]
    assert [json.loads(line)["step"] for line in lines[1].splitlines()] == list(range(1, 7))
    if precision == "fp16":
        assert start(job).state == expected, "a run that has ended says it again"


def test_sigterm_saves_at_once_and_a_kill_in_that_save_loses_nothing(tmp_path: Path) -> None:
    expected = start(Job(tmp_path / "whole", parallel="ddp", steps=4, save_every=4)).state
    job = Job(tmp_path / "killed", parallel="ddp", steps=4, save_every=4)
    term = Kill(3, 1, "after the update", signal.SIGTERM)
    codes = start(job, kills=(term, Kill(3, 0, "write"))).codes
    assert codes[0] == -signal.SIGKILL
    assert complete(job.folder) == []
    ended = start(job, kills=(term,))
    assert ended.codes == [0, 0], ended.errors
    assert complete(job.folder) == ["step-3"]
    assert "step 3 of 4" in ended.output
    assert start(job).state == expected


def test_other_numbers_of_ranks_lose_no_state(tmp_path: Path, whole: Whole) -> None:
    """A SHA-256 of what two ranks saved is that of what three and one load. Then each takes some steps."""
    folder, uninterrupted = whole("remainder", "fsdp")
    job = Job(tmp_path / "moved", "remainder")
    before = 2
    state = start(Job(job.folder, "remainder", steps=2)).state
    for world, steps in ((3, 3), (1, 4), (2, 6)):
        if world != 2:
            assert start(Job(job.folder, "remainder", steps=before), world).state == state, f"loaded by {world}"
        state, before = start(Job(job.folder, "remainder", steps=steps), world).state, steps
    assert {**state, "digest": ""} == {**uninterrupted, "digest": ""}
    rows = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (folder, job.folder)
    ]
    for expected, got in zip(*rows, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert got["lr"] == expected["lr"]


def torchs_run() -> pretrain.Run:
    """The same training with torch.amp and torch.optim, in one process."""
    torch.manual_seed(0)
    model = pretrain.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return pretrain.Run(model, optimizer, scaler, torch.optim.lr_scheduler.LambdaLR(optimizer, pretrain.rate))


def train(run: pretrain.Run, steps: int) -> None:
    while run.step < steps:
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = run.model(run.stream.next())
        run.scaler.scale(loss).backward()
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.schedule.step()
        run.step += 1
        run.losses.append(loss.item())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of no_dist
def test_from_torch_to_ampkit_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(pretrain, name, size)
    old = torchs_run()
    train(old, 4)
    dcp.save({"run": old}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    job = Job(tmp_path / "ours", steps=6, torchs=tmp_path / "torchs")
    ended = start(job)
    assert ended.state["scale"] == "4096", "it has grown after the third step, and after the sixth"
    back = torchs_run()
    dcp.load({"run": back}, checkpoint_id=job.folder / "step-6", no_dist=True)
    assert (back.step, back.scaler.get_scale(), back.losses[:4]) == (6, 4096.0, old.losses)
    train(back, 8)
    train(old, 8)
    assert back.losses == pytest.approx(old.losses, rel=2e-3)
    assert back.scaler.state_dict() == old.scaler.state_dict()
    assert back.schedule.state_dict() == old.schedule.state_dict()

    loaded = torchs_run()
    dcp.load({"run": loaded}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    again = torchs_run()
    train(again, 4)
    assert_equal(loaded.model.state_dict(), again.model.state_dict())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "argument --steps: got '0'; expected 1 or more"),
        (["--save-every", "0"], "argument --save-every: got '0'; expected 1 or more"),
        (["--folder", "file"], "argument --folder: file: File exists; expected a folder to write to"),
        (["--folder", "file/run"], "argument --folder: file/run: Not a directory; expected a folder to write to"),
        (
            ["--start-from-torch", "absent"],
            "argument --start-from-torch: absent has no .metadata; expected a checkpoint",
        ),
    ],
)
def test_wrong_arguments_end_before_ranks_meet(
    tmp_path: Path,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "examples" / "pretrain.py"), run_name="__main__")
    assert expected in capsys.readouterr().err


def children(pid: int) -> list[int]:
    """Its child processes that run the example."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"pretrain.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_under_torchrun_any_process_may_be_killed(tmp_path: Path) -> None:
    """First a rank, after its first checkpoint, then torchrun itself, whose ranks must not live on."""
    arguments = ["--precision", "bf16", "--steps", "100000", "--save-every", "3", "--folder", str(tmp_path / "run")]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = 0
    for victim in ("rank", "torchrun"):
        with (tmp_path / f"{victim}.txt").open("w") as text:
            launcher = subprocess.Popen(
                [*command, "examples/pretrain.py", *arguments], cwd=ROOT, env=environment, stdout=text, stderr=text
            )
        ranks: list[int] = []
        until = time.monotonic() + 200
        try:
            while not (steps := [int(name[5:]) for name in complete(tmp_path / "run")]) or max(steps) <= done:
                assert launcher.poll() is None, (tmp_path / f"{victim}.txt").read_text()
                assert time.monotonic() < until, (tmp_path / f"{victim}.txt").read_text()
                time.sleep(0.05)
            ranks = children(launcher.pid)
            assert len(ranks) == 2
            os.kill(ranks[1] if victim == "rank" else launcher.pid, signal.SIGKILL)
            assert launcher.wait(60) != 0
            until = time.monotonic() + 60
            while any(map(is_running, ranks)):
                assert time.monotonic() < until, "a rank lives on"
                time.sleep(0.05)
        finally:
            for pid in filter(is_running, [launcher.pid, *ranks]):
                os.kill(pid, signal.SIGKILL)
            launcher.wait()
        done = max(int(name[5:]) for name in complete(tmp_path / "run"))
    expected = start(Job(tmp_path / "whole", "bf16", steps=done + 2, save_every=done + 2, small=False)).state
    assert start(Job(tmp_path / "run", "bf16", steps=done + 2, small=False)).state == expected
