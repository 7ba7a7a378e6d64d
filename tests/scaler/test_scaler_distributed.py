"""The scaler on 2 and 4 gloo ranks: they skip together and hold one scale, whoever saw the overflow."""

import math
import re

import pytest
import torch
import torch.multiprocessing as mp

from tests.helpers import scaler_ranks
from tests.helpers.scaler_ranks import CASES, INF_AT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per world size and case, what each rank returned."""
    out = {}
    for world in CASES:
        folder = tmp_path_factory.mktemp(f"world{world}")
        mp.spawn(scaler_ranks.main, args=(world, str(folder)), nprocs=world)
        ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
        out[world] = {name: [rank[name] for rank in ranks] for name in CASES[world]}
    return out


def of(results, world: int, name: str) -> list:
    ranks = results[world][name]
    for rank, value in enumerate(ranks):
        assert not isinstance(value, str), f"rank {rank} failed:\n{value}"
    return ranks


TRAINED = [
    (2, name) for name in CASES[2] if name.startswith(("ddp", "fsdp", "tp")) and name not in ("ddp_torch", "fsdp_torch")
] + [(4, name) for name in ("ddp", "fsdp", "two_dimensions_foreach", "two_dimensions_clip")]


@pytest.mark.parametrize(("world", "name"), TRAINED)
def test_ranks_skip_together_and_hold_one_scale(results, world, name) -> None:
    """An inf on the last rank only; everybody's parameters stay where they were, and equal."""
    ranks = of(results, world, name)
    for seen in ranks:
        assert seen["skipped"] == [step == INF_AT for step in range(scaler_ranks.STEPS)]
        assert seen["scales"] == [2.0**16] * INF_AT + [2.0**15] * (scaler_ranks.STEPS - INF_AT)
        assert seen["params"] == ranks[0]["params"]
        assert (seen["params"][INF_AT] == seen["params"][INF_AT - 1]) is True
        assert seen["params"][INF_AT + 1] != seen["params"][INF_AT]


@pytest.mark.parametrize(("world", "name"), [pair for pair in TRAINED if "clip" in pair[1] or pair[0] == 4])
def test_the_norm_is_the_whole_models(results, world, name) -> None:
    for seen in of(results, world, name):
        for step, (norm, plain) in enumerate(zip(seen["norms"], seen["plain_norms"], strict=True)):
            if step == INF_AT:
                assert not math.isfinite(norm)
            else:
                assert norm == pytest.approx(plain, rel=1e-6)


FLAT = [name for name in CASES[2] if name.startswith("flat")]


@pytest.mark.parametrize("name", FLAT)
def test_flat_shards_of_the_first_fsdp_skip_together(results, name) -> None:
    """An inf on one rank; its parameters are plain tensors with a mark."""
    for seen in of(results, 2, name):
        assert seen["skipped"] == [step == INF_AT for step in range(scaler_ranks.STEPS)]
        assert seen["scales"] == [2.0**16] * INF_AT + [2.0**15] * (scaler_ranks.STEPS - INF_AT)


@pytest.mark.parametrize("name", [name for name in FLAT if "clip" in name])
def test_flat_shards_are_clipped_by_the_whole_norm_or_not_at_all(results, name) -> None:
    """With a process group; without one the norm would be that of a shard."""
    for seen in of(results, 2, name):
        assert re.match(r"clip_grad_norm_ got shards of FullyShardedDataParallel, .* process_group=", seen["refusal"])
        for step, (norm, plain) in enumerate(zip(seen["norms"], seen["plain_norms"], strict=True)):
            assert norm == pytest.approx(plain, rel=1e-6) if step != INF_AT else not math.isfinite(norm)


def test_a_disabled_scaler_clips_shards_by_the_whole_norm(results) -> None:
    """As an enabled one does."""
    for rank, seen in enumerate(of(results, 2, "plain_clipping")):
        assert seen["norm 2.0"] == pytest.approx(math.sqrt(10.0))
        assert seen["grad 2.0"] == pytest.approx([(rank + 1) / math.sqrt(10.0)] * 2, rel=1e-5)
        assert seen["norm inf"] == 2.0
        assert seen["grad inf"] == pytest.approx([(rank + 1) / 2] * 2, rel=1e-5)
        assert seen["with an empty group"] == pytest.approx([0.0, math.sqrt(2.5)])
        assert seen["refusal"].startswith("clip_grad_norm_ got shards of FullyShardedDataParallel")


def test_ranks_that_drift_apart_under_ddp_are_told(results) -> None:
    """By a check that they all make; on every rank."""
    for seen in of(results, 2, "drifted"):
        before, after = seen["messages"]
        assert before == ""
        assert after.startswith("ranks have drifted apart: scale from 32768 to 65536, steps from 1 to 2, skips from 0")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_equal_to_torch_to_the_bit(results, kind) -> None:
    ours, theirs = of(results, 2, f"{kind}_foreach"), of(results, 2, f"{kind}_torch")
    for a, b in zip(ours, theirs, strict=True):
        assert (a["scales"], a["params"]) == (b["scales"], b["params"])


@pytest.mark.parametrize("which", ["foreach", "fused", "ampkit", "sgd_fused"])
def test_a_process_group_agrees_for_every_optimizer(results, which) -> None:
    for seen in of(results, 2, f"hand_{which}"):
        assert seen["scales"] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
        assert seen["moved"] == [True, True, False, True]
        assert seen["tracker"] == 1


def test_torchs_sharded_scaler_lets_fused_ranks_drift_apart(results) -> None:
    """The reason for the test above."""
    first, second = of(results, 2, "hand_torch_fused")
    assert first["scales"] != second["scales"]
    assert first["moved"] != second["moved"]


@pytest.mark.parametrize(("world", "name"), [(2, "hand_empty"), (2, "hand_empty_fused"), (4, "hand")])
def test_a_rank_without_gradients_follows_the_others(results, world, name) -> None:
    ranks = of(results, world, name)
    assert all(seen["scales"] == [2.0**16, 2.0**16, 2.0**15, 2.0**15] for seen in ranks)
    assert all(seen["tracker"] == 1 for seen in ranks)
    assert ranks[0]["moved"] == [False] * 4
    assert ranks[-1]["moved"] == [True, True, False, True]


@pytest.mark.parametrize("name", ["meshes_0", "meshes_3"])
def test_gradients_on_several_meshes_agree_over_all_of_them(results, name) -> None:
    for seen in of(results, 4, name):
        assert seen == {"scale": 2.0**15, "plain": [1.0, 1.0]}


def test_torch_agrees_over_fewer_ranks(results) -> None:
    """The reason for the test above: some ranks step, others skip."""
    ranks = results[4]["meshes_torch"]
    assert any(isinstance(seen, str) for seen in ranks) or len({seen["scale"] for seen in ranks}) > 1


def test_pending_reductions_are_settled_first(results) -> None:
    for seen in of(results, 2, "pending"):
        norm, param, skipped = seen["finite"]
        assert (norm, param, skipped) == (pytest.approx(4.0 * math.sqrt(2)), [-3.0, -3.0], False)
        assert seen["overflows"][1:] == ([1.0, 1.0], True)


@pytest.mark.parametrize("world", [2, 4])
def test_stages_clip_by_one_norm(results, world) -> None:
    parts = [float(rank + 1) for rank in range(world) for _ in range(2)]
    for seen in of(results, world, "stages"):
        assert seen[2.0] == pytest.approx(math.sqrt(sum(p * p for p in parts)))
        assert seen[1.0] == sum(parts)
        assert seen[math.inf] == max(parts)
        assert seen[3.0] == pytest.approx(sum(p**3 for p in parts) ** (1 / 3))


def test_different_scales_are_reported_once(results) -> None:
    for seen in of(results, 2, "scales"):
        assert seen["disagreement"] is True
        assert len(seen["messages"]) == 1
        assert "hold different loss scales, from 16 to 32" in seen["messages"][0]


def test_a_bad_loss_on_one_rank_ends_the_step_on_all(results) -> None:
    for seen in of(results, 2, "closure"):
        assert seen == {"result": None, "param": [1.0, 1.0], "scale": 2.0**15, "evaluations": 2}


def test_process_groups_are_copied_and_not_pickled(results) -> None:
    for seen in of(results, 2, "pickling"):
        assert "a GradScaler with a process_group cannot be pickled" in seen["message"]
        assert seen["same"]
