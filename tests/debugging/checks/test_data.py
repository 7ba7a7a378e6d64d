"""Values that came with the data: the batch of a loader, and outliers."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampkit import autocast
from tests.debugging.planted import B16, F16, findings, line_of, only


@pytest.mark.parametrize("workers", [0, 1])
def test_inf_in_the_data(workers: int) -> None:
    """Through a worker's shared memory too, which is no memory that was not written to."""
    x = torch.ones(8, 3)
    x.numpy()[5, 1] = float("inf")  # where the examination does not see it
    model = nn.Linear(3, 1)

    def run() -> None:
        for (batch,) in DataLoader(TensorDataset(x), batch_size=4, num_workers=workers):  # loader
            model(batch).sum()

    found = only(run)
    assert (found.grade, found.check, found.kind) == ("error", "data", "arrived")
    if workers:
        assert (
            f"batch 1 of the loader at tests/debugging/checks/test_data.py:{line_of(__file__, 'loader')}"
            in found.cause.text
        )
        assert "inf in 1 of 12 elements, in row 1 of 4, column 1 of 3" in found.cause.text
    else:
        assert found.place.line == line_of(__file__, "loader")


def test_an_outlier_in_the_data() -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    batch = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1e9, 3.0]])

    def run() -> None:
        with autocast("cpu", dtype=F16):
            model(batch).float().sum().backward()

    found = findings(run)[0]
    assert "no parameter took part in it: it arrived with the data" in found.cause.text
    assert "in row 1 of 2" in found.elements
    assert "rows of the data" in found.fix.code


def test_a_sum_of_two_masks_is_not_blamed_on_the_data() -> None:
    """As in OPT with left padding: the sum of two finite masks is -inf, and scores below 0 complete a row of -inf."""
    model, least = nn.Linear(4, 4), torch.finfo(F16).min

    def run() -> None:
        causal = torch.full((4, 4), least, dtype=F16).triu(1)
        padding = (1.0 - (torch.arange(4) > 1).to(F16)) * least
        mask = causal + padding  # overflows
        with torch.autocast("cpu", F16):
            loss = (model(torch.ones(4, 4)) - 100.0 + mask).softmax(-1).float().square().sum()
        loss.backward()

    found = findings(run)[0]
    assert (found.kind, found.grade, found.place.line) == ("overflow", "error", line_of(__file__, "overflows"))
    assert "it is the sum of two masks" in found.cause.text
    assert "clamp" in found.fix.code


def test_a_large_number_of_the_code_is_not_the_datas() -> None:
    model = nn.Linear(3, 1)

    def run() -> None:
        target = torch.ones(2, 1, dtype=B16) * 3 * 3e38  # beyond bfloat16
        (model(torch.ones(2, 3)) - target.float()).square().mean().backward()

    found = findings(run)[0]
    assert found.place.line == line_of(__file__, "beyond bfloat16")
    assert "data" not in found.cause.text


def test_an_outlier_of_a_batch_that_overflows_in_a_layer() -> None:
    """A parameter takes part in it, but no precision bears 1e38 squared."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    batch = torch.randn(4, 3)
    batch[2, 0] = 1e38

    def run() -> None:
        with torch.autocast("cpu", B16):
            model(batch).float().square().mean().backward()

    found = findings(run)[0]
    assert "the input has 1e+38" in found.cause.text
    assert "in row 2 of 4: it arrived with the data" in found.cause.text
