"""The scaler on 2 and 4 gloo ranks: they skip together and hold one scale, whoever saw the overflow."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers import scaler_ranks
from tests.helpers.ranks import on_ranks
from tests.helpers.scaler_ranks import INF_AT, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")]

SKIPPED = [step == INF_AT for step in range(STEPS)]
SCALES = [2.0**16] * INF_AT + [2.0**15] * (STEPS - INF_AT)
TRAINED: list[tuple[int, Callable[..., Any], str, bool]] = [
    *((2, scaler_ranks.ddp, which, False) for which in ("foreach", "fused", "ampkit")),
    (2, scaler_ranks.ddp, "foreach", True),
    *((2, scaler_ranks.fsdp, which, False) for which in ("foreach", "fused")),
    (2, scaler_ranks.fsdp, "foreach", True), (2, scaler_ranks.fsdp, "ampkit", True),
    (4, scaler_ranks.fsdp, "fused", True),
    (4, scaler_ranks.two_dimensions, "foreach", False), (4, scaler_ranks.two_dimensions, "fused", True),
]


@pytest.mark.parametrize(("world", "train", "which", "clip"), TRAINED)
def test_ranks_skip_together_and_hold_one_scale(world: int, train: Callable[..., Any], which: str, clip: bool) -> None:
    """An inf on the last rank only; parameters stay where they were everywhere, and equal. Norms are the whole model's.
    """
    ranks = on_ranks(train, which, clip, world=world)
    for seen in ranks:
        assert seen["skipped"] == SKIPPED
        assert seen["scales"] == SCALES
        assert seen["params"] == ranks[0]["params"]
        assert (seen["params"][INF_AT] == seen["params"][INF_AT - 1]) is True
        assert seen["params"][INF_AT + 1] != seen["params"][INF_AT]
        assert_whole_norms(seen)


def assert_whole_norms(seen: dict[str, Any]) -> None:
    """Norms as torch computes them of whole gradients, and not finite in the step with an inf."""
    for step, (norm, plain) in enumerate(zip(seen["norms"], seen["plain_norms"], strict=True)):
        assert norm == pytest.approx(plain, rel=1e-6) if step != INF_AT else not math.isfinite(norm)


@pytest.mark.parametrize(("which", "original", "clip"), [
    ("foreach", False, False), ("fused", False, False), ("ampkit", True, False), ("foreach", False, True),
    ("ampkit", True, True),
])
def test_flat_shards_of_the_first_fsdp_skip_together(which: str, original: bool, clip: bool) -> None:
    """An inf on one rank; its parameters are plain tensors with a mark. Without a process group clipping is refused:
    the norm would be that of a shard.
    """
    for seen in on_ranks(scaler_ranks.flat, which, original, clip):
        assert seen["skipped"] == SKIPPED
        assert seen["scales"] == SCALES
        refusal = r"clip_grad_norm_ got shards of FullyShardedDataParallel, .* process_group="
        assert re.match(refusal, seen["refusal"]) if clip else not seen["norms"]
        assert_whole_norms(seen)


def test_a_disabled_scaler_clips_shards_by_the_whole_norm() -> None:
    """As an enabled one does."""
    for rank, seen in enumerate(on_ranks(scaler_ranks.plain_clipping_of_shards)):
        assert seen["norm 2.0"] == pytest.approx(math.sqrt(10.0))
        assert seen["grad 2.0"] == pytest.approx([(rank + 1) / math.sqrt(10.0)] * 2, rel=1e-5)
        assert seen["norm inf"] == 2.0
        assert seen["grad inf"] == pytest.approx([(rank + 1) / 2] * 2, rel=1e-5)
        assert seen["with an empty group"] == pytest.approx(math.sqrt(2.5))
        assert seen["refusal"].startswith("clip_grad_norm_ got shards of FullyShardedDataParallel")


def test_ranks_that_drift_apart_under_ddp_are_found() -> None:
    """By a check that they all make; on every rank."""
    for seen in on_ranks(scaler_ranks.drifted):
        before, after = seen["messages"]
        assert before == ""
        assert after.startswith("ranks have drifted apart: scale from 32768 to 65536, steps from 1 to 2, skips from 0")


@pytest.mark.parametrize("train", [scaler_ranks.ddp, scaler_ranks.fsdp])
def test_equal_to_torch_to_the_bit(train: Callable[..., Any]) -> None:
    ours, theirs = on_ranks(train, "foreach"), on_ranks(train, "foreach", False, torch.amp.GradScaler)
    for a, b in zip(ours, theirs, strict=True):
        assert (a["scales"], a["params"]) == (b["scales"], b["params"])


@pytest.mark.parametrize("which", ["foreach", "fused", "ampkit", "sgd_fused"])
def test_a_process_group_agrees_for_every_optimizer(which: str) -> None:
    for seen in on_ranks(scaler_ranks.by_hand, which):
        assert seen["scales"] == SCALES
        assert seen["moved"] == [True, True, False, True]
        assert seen["tracker"] == 1


@pytest.mark.parametrize(("world", "which"), [(2, "foreach"), (2, "fused"), (4, "fused")])
def test_a_rank_without_gradients_follows_the_others(world: int, which: str) -> None:
    ranks = on_ranks(scaler_ranks.by_hand, which, True, world=world)
    assert all(seen["scales"] == SCALES for seen in ranks)
    assert all(seen["tracker"] == 1 for seen in ranks)
    assert ranks[0]["moved"] == [False] * 4
    assert ranks[-1]["moved"] == [True, True, False, True]


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_gradients_on_several_meshes_agree_over_all_of_them(bad_rank: int) -> None:
    for seen in on_ranks(scaler_ranks.several_meshes, bad_rank, world=4):
        assert seen == {"scale": 2.0**15, "plain": [1.0, 1.0]}


def test_pending_reductions_are_settled_first() -> None:
    for seen in on_ranks(scaler_ranks.pending_reduction):
        norm, param, skipped = seen["finite"]
        assert (norm, param, skipped) == (pytest.approx(4.0 * math.sqrt(2)), [-3.0, -3.0], False)
        assert seen["overflows"][1:] == ([1.0, 1.0], True)


@pytest.mark.parametrize("world", [2, 4])
def test_stages_clip_by_one_norm(world: int) -> None:
    parts = [float(rank + 1) for rank in range(world) for _ in range(2)]
    for seen in on_ranks(scaler_ranks.norm_over_stages, world=world):
        assert seen[2.0] == pytest.approx(math.sqrt(sum(p * p for p in parts)))
        assert seen[1.0] == sum(parts)
        assert seen[math.inf] == max(parts)
        assert seen[3.0] == pytest.approx(sum(p**3 for p in parts) ** (1 / 3))


def test_a_bad_loss_on_one_rank_ends_the_step_on_all() -> None:
    for seen in on_ranks(scaler_ranks.closure_on_one_rank):
        assert seen == {"result": None, "param": [1.0, 1.0], "scale": 2.0**15, "evaluations": 2}


def test_process_groups_are_copied_and_not_pickled() -> None:
    for seen in on_ranks(scaler_ranks.pickling):
        assert "cannot pickle" in seen["message"]
        assert "ProcessGroup" in seen["message"]
        assert seen["same"]
