"""Inf and NaN that are intended, and those that are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.debugging.planted import B16, F16, findings, line_of, only


@pytest.mark.parametrize("reads", [False, True])
def test_a_true_nan_that_nothing_uses_is_a_note(reads: bool) -> None:
    """As the disparity of rays that hit nothing in NeRF, which is 0/0 in float32 and reaches no loss."""

    def run() -> None:
        model, batch = nn.Linear(4, 4), torch.randn(3, 4)
        weights = torch.zeros(3)
        with torch.autocast("cpu", B16):
            result = model(batch)
        ratio = weights / weights
        loss = result.float().square().mean() + (ratio.sum() if reads else 0.0)
        loss.backward()

    assert only(run).grade == ("error" if reads else "note")


def softmax_by_hand(scores: Tensor) -> Tensor:
    weights = (scores * 20).exp()  # overflows
    return weights / weights.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (softmax_by_hand, "overflows"),
        (lambda scores: scores - scores.detach(), "the difference of two masks"),  # the difference of two masks
    ],
    ids=["exp", "difference"],
)
def test_a_mask_is_not_what_goes_wrong(function: Callable[[Tensor], Tensor], line: str) -> None:
    """-9e15 is -inf in float16, on purpose or not; the operator that makes +inf or NaN beside it is the place."""
    model = nn.Linear(4, 4)

    def run() -> None:
        with torch.autocast("cpu", F16):
            scores = model(torch.full((4, 4), 2.0))
            mask = -9e15 * torch.ones_like(scores)
            masked = torch.where(torch.eye(4) > 0, scores, mask)
            function(masked).float().sum().backward()

    found = findings(run)[0]
    assert found.grade == "error"
    assert found.place.line == line_of(__file__, line)


def test_an_inf_that_is_masked_is_a_note() -> None:
    model = nn.Linear(4, 1)

    def run() -> None:
        with torch.autocast("cpu", F16):
            result = model(torch.full((4, 4), 100.0)) * 0 + 1
            loss = (result * 60000 * 60000).sigmoid().float().sum()  # absorbed
        loss.backward()

    found = only(run)
    assert (found.grade, found.place.line) == ("note", line_of(__file__, "absorbed"))
    assert "a result is inf, which a later operator masks" in found.what
    assert "float32" in found.fix.code


def test_an_epsilon_that_rounding_removes_before_what_is_absorbed() -> None:
    """As in the log-mel features of speech, whose floor of 1e-10 is 0 in float16."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run() -> None:
        for _ in range(3):
            decibels = torch.zeros(4, 4, dtype=F16).clamp(min=1e-10).log10()  # a floor
            model(torch.maximum(decibels, torch.tensor(-8.0)).float()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = only(run)
    assert (found.grade, found.place.line) == ("note", line_of(__file__, "a floor"))
    assert found.cause.text.startswith("1e-10 is 0 in float16")
    assert "write a number that the dtype can represent" in found.fix.code
    assert (found.step, found.last, found.times) == (0, 2, 3)


def test_alignments_of_a_ctc_loss_that_are_impossible_are_no_note() -> None:
    model = nn.Linear(4, 5)

    def run() -> None:
        log_probs = model(torch.randn(6, 2, 4)).log_softmax(-1)
        targets = torch.tensor([[1, 2], [3, 3]])
        nn.functional.ctc_loss(log_probs, targets, torch.tensor([6, 6]), torch.tensor([2, 2])).backward()

    assert findings(run) == []


def test_a_gradient_that_is_nan_and_clipped_is_no_note() -> None:
    """Clipping multiplies all gradients by NaN, and the scaler skips each step."""
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def run() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", F16):
                result = model(torch.randn(3, 4))
                loss = (result + (result - result.detach()).square().sqrt()).float().sum()  # root of 0
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    found = findings(run)[0]
    assert (found.grade, found.place.line) == ("error", line_of(__file__, "root of 0"))
    assert found.what.startswith("the gradient of")
