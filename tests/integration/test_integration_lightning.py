"""`ampkit.integrations.lightning` and `fabric` with the real library."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ampkit.optim
from ampkit import DynamicLossScale, GradScaler, NoOpLossScale, Policy, StaticLossScale
from tests.helpers.faults import plant_nonfinite

pytest.importorskip("lightning", reason="it is in ampkit[dev]")
# Lightning's own, about versions of torch, logging folders and the number of workers
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision as LightningPrecision  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402
from lightning.pytorch.utilities import GradClipAlgorithmType  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from ampkit.integrations import fabric as for_fabric  # noqa: E402
from ampkit.integrations.lightning import FSDPPrecision, MixedPrecision, ScaleMonitor  # noqa: E402

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "ampkit": lambda params: ampkit.optim.SGD(params, lr=0.1),
}
RUNS: list[tuple[Any, ...]] = [
    *(("16-mixed", name, DynamicLossScale(256.0)) for name in OPTIMIZERS),
    ("bf16-mixed", "fused", None),
    ("bf16-mixed", "foreach", NoOpLossScale()),
]


class Module(LightningModule):
    """Notes what its hooks see."""

    def __init__(self, which: str = "foreach", *, manual: bool = False, skip: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        self.which = which
        self.automatic_optimization = not manual
        self.skip = skip
        self.norms: list[float] = []
        self.dtypes: set[torch.dtype] = set()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        if batch_idx == self.skip:
            return None
        out = self.layers(batch)
        self.dtypes.add(out.dtype)
        loss = out.float().square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [param.grad.norm() for param in self.parameters() if param.grad is not None]
        self.norms.append(float(torch.stack(grads).norm()) if grads else 0.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.which](self.parameters())


def batches() -> DataLoader[Any]:
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(inputs, batch_size=4)  # pyright: ignore[reportArgumentType]


def fit(module: Module, plugin: Any, folder: Path, *, resume: str | None = None, **settings: Any) -> Trainer:
    settings = {"max_steps": 4, "logger": False, "enable_checkpointing": False, "gradient_clip_val": 0.1, **settings}
    if not module.automatic_optimization:
        del settings["gradient_clip_val"]
    trainer = Trainer(
        accelerator="cpu",
        devices=settings.pop("devices", 1),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[] if plugin is None else [plugin],
        **settings,
    )
    trainer.fit(module, batches(), ckpt_path=resume, weights_only=False)
    return trainer


def sixteen(scale: float = 256.0, **settings: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=scale), **settings)


def scaler_of(scale: Any) -> Any:
    return None if scale is None else GradScaler("cpu", loss_scale=scale, skip_above=1e3)


def weights(module: Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(("precision", "which", "scale"), RUNS)
def test_every_optimizer_clips(tmp_path: Path, which: str, precision: Any, scale: Any, manual: bool) -> None:
    """Hooks see unscaled gradients, and weights end where float32 training with clipping ends."""
    true = Module(which, manual=manual)
    fit(true, None, tmp_path)
    ours = Module(which, manual=manual)
    fit(ours, MixedPrecision(precision, "cpu", scaler_of(scale)), tmp_path)
    assert ours.dtypes == {torch.float16 if precision == "16-mixed" else torch.bfloat16}
    if (manual, which, precision) != (True, "ampkit", "16-mixed"):  # there hooks run before the multiplication
        assert ours.norms == pytest.approx(true.norms, rel=0.05)
    for mine, theirs in zip(weights(ours), weights(true), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=2e-3)


def test_torchs_policy_trains_as_lightning_to_the_bit(tmp_path: Path) -> None:
    """In bfloat16 and in float16."""
    for precision in ("bf16-mixed", "16-mixed"):
        plain, ours = Module(), Module()
        theirs = torch.amp.GradScaler("cpu", init_scale=256.0) if precision == "16-mixed" else None
        mine = GradScaler("cpu", init_scale=256.0) if precision == "16-mixed" else None
        fit(plain, LightningPrecision(precision, "cpu", theirs), tmp_path)
        fit(ours, MixedPrecision(precision, "cpu", mine, policy=Policy.torch("cpu")), tmp_path)
        assert ours.losses == plain.losses
        torch.testing.assert_close(weights(ours), weights(plain), rtol=0, atol=0)


def test_rules_for_modules_hold_under_the_trainer(tmp_path: Path) -> None:
    module, seen = Module(), []
    module.layers[0].register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    policy = Policy.default("cpu").for_modules(module, {"layers.0": torch.float32})
    fit(module, MixedPrecision("bf16-mixed", "cpu", policy=policy), tmp_path)
    assert set(seen) == {torch.float32}
    assert module.dtypes == {torch.bfloat16}


def test_an_overflow_is_skipped_logged_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the callback, from what the scaler counted, and it says when there is nothing to log."""
    module = Module("fused")
    plant_nonfinite(module.layers[2].weight, 2)
    with caplog.at_level("INFO"):
        trainer = fit(module, sixteen(), tmp_path, callbacks=[ScaleMonitor()], log_every_n_steps=2)
        assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
            "loss_scale": 128.0,
            "skipped_steps": 1.0,
        }
        assert "layers.2.weight" in caplog.text
        trainer = fit(Module(), MixedPrecision("bf16-mixed", "cpu"), tmp_path, callbacks=[ScaleMonitor()])
    assert "loss_scale" not in trainer.callback_metrics
    assert "ScaleMonitor logs nothing: the precision plugin is ampkit" in caplog.text


@pytest.mark.parametrize(("precision", "scale"), [("16-mixed", StaticLossScale(4.0)), ("bf16-mixed", NoOpLossScale())])
def test_steps_of_a_large_norm_are_skipped_and_logged(tmp_path: Path, precision: Any, scale: Any) -> None:
    """Although Lightning clips their gradients."""
    for manual in (False, True):
        module = Module(manual=manual)
        plugin = MixedPrecision(precision, "cpu", GradScaler("cpu", loss_scale=scale, skip_above=0.12))
        trainer = fit(module, plugin, tmp_path, callbacks=[ScaleMonitor()], log_every_n_steps=4)
        assert trainer.callback_metrics["skipped_steps"] == 4.0
        torch.testing.assert_close(weights(module), weights(Module()), rtol=0, atol=0)


def test_accumulation_and_batches_without_a_loss(tmp_path: Path) -> None:
    """Two batches per step, whose casts a cache keeps; a `training_step` that returns None leaves the scaler alone."""
    for skip, accumulate, updates in ((0, 2, 4), (1, 1, 7)):
        plugin = sixteen()
        fit(Module(skip=skip), plugin, tmp_path, accumulate_grad_batches=accumulate, max_steps=-1, max_epochs=1)
        assert plugin.scaler.stats().updates == updates


@pytest.mark.parametrize("ours_saves", [True, False])
def test_checkpoints_resume_both_ways(tmp_path: Path, ours_saves: bool) -> None:
    """A plugin's state is saved under its class's name, which is Lightning's."""

    def plugin(ours: bool, scale: float) -> Any:
        theirs = torch.amp.GradScaler("cpu", init_scale=scale)
        return sixteen(scale) if ours else LightningPrecision("16-mixed", "cpu", theirs)

    module = Module()
    plant_nonfinite(module.layers[2].weight, 2)
    trainer = fit(module, plugin(ours_saves, 256.0), tmp_path)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed = plugin(not ours_saves, 2.0)
    fit(Module(), resumed, tmp_path, resume=str(tmp_path / "run.ckpt"), max_steps=5)
    assert resumed.scaler.get_scale() == 128.0


class FsdpOnCpu(FSDPStrategy):
    """Lightning's strategy, which is for GPUs, but for the call that wraps the model."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


class Sharded(Module):
    """Its second gradients hold inf, in the first rank's shard."""

    def on_after_backward(self) -> None:
        grads = [param.grad for param in self.parameters() if param.grad is not None and param.grad.numel()]
        if self.trainer.global_step == 1 and self.trainer.global_rank == 0:
            grads[0].view(-1)[0] = torch.inf

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore::FutureWarning:torch")
def test_an_overflow_is_skipped_under_the_fsdp_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process with a fused optimizer; that ranks skip together is the scaler's doing, and tested there."""
    names = {"TORCHELASTIC_RUN_ID": "ranks", "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (names | {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}).items():
        monkeypatch.setenv(name, str(value))
    plugin = FSDPPrecision("16-mixed", GradScaler("cpu", init_scale=256.0), device="cpu")
    module = Sharded("fused")
    try:
        fit(module, None, tmp_path, strategy=FsdpOnCpu(precision_plugin=plugin), gradient_clip_val=None)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert module.dtypes == {torch.float16}
    stats = plugin.scaler.stats()
    assert (stats.scale, stats.steps, stats.skips) == (128.0, 3, 1)


def test_values_are_clipped_under_the_fsdp_plugin_and_norms_are_refused() -> None:
    """Norms Lightning refuses under that strategy."""
    plugin = FSDPPrecision("16-mixed", GradScaler("cpu"), device="cpu")
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param])
    assert plugin.scaler is not None
    plugin.scaler.scale(param.sum())
    param.grad = torch.full((2,), 2.0**20)
    with pytest.raises(Exception, match="`gradient_clip_algorithm='norm'` is currently not supported"):
        plugin.clip_gradients(optimizer, 1.0)
    plugin.clip_gradients(optimizer, 3.0, GradClipAlgorithmType.VALUE)
    assert param.grad.tolist() == [3.0, 3.0]


def test_what_does_not_fit_is_refused() -> None:
    """When it is given, not at the first region."""
    torchs: Any = torch.amp.GradScaler("cpu")
    for cls in (MixedPrecision, for_fabric.MixedPrecision):
        with pytest.raises(ValueError, match="policy is 'defalt'; expected a Policy for 'cpu'"):
            cls("bf16-mixed", "cpu", policy="defalt")
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="device is 'cuda', which this machine does not have"):
                cls("16-mixed", "cuda")
        with pytest.raises(TypeError, match=r"torch\.amp\.grad_scaler\.GradScaler; expected an ampkit.GradScaler"):
            cls("16-mixed", "cpu", torchs)
    with pytest.raises(ValueError, match="Precision must be '16-mixed' or 'bf16-mixed'"):
        FSDPPrecision("32-true")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected an ampkit"):
        FSDPPrecision("16-mixed", torchs)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("bf16-mixed", "cpu")])
    with pytest.raises(TypeError, match=r"for Lightning's Trainer, but got a Linear from Fabric; pass Fabric\(plugins"):
        fabric.setup(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("precision", "which", "scale"), RUNS)
def test_fabric_clips_steps_and_resumes(tmp_path: Path, which: str, precision: Any, scale: Any) -> None:
    """The norm is that of unscaled gradients; the plugin's state goes into the checkpoint."""
    plugin = for_fabric.MixedPrecision(precision, "cpu", scaler_of(scale))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    layers = Module().layers
    seen: list[bool] = []
    layers[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    plain = Module().layers
    model, optimizer = fabric.setup(layers, OPTIMIZERS[which](layers.parameters()))
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        fabric.backward(model(batch).square().mean())
        if step == 0:
            plain(batch).square().mean().backward()
            true = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()])
        if step == 2:
            layers[0].weight.grad[0, 0] = torch.inf
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False)
        if step == 0:
            torch.testing.assert_close(norm, true, rtol=0.05, atol=0.0)
        if scale is not None or step != 2:
            optimizer.step()
    assert set(seen) == {True}
    assert [name for name, param in layers.named_parameters() if not param.isfinite().all()] == []
    fabric.save(tmp_path / "run.ckpt", {"model": model, "precision": plugin})
    again = for_fabric.MixedPrecision(precision, "cpu", scaler_of(scale))
    fabric.load(tmp_path / "run.ckpt", {"model": model, "precision": again}, weights_only=False)
    if scale is not None:
        stats = again.scaler.stats()
        assert stats == plugin.scaler.stats()
        assert (stats.scale, stats.skips) == (128.0 if precision == "16-mixed" else 1.0, 1)
