"""State that is rounded in place."""

import torch
from torch import nn

from tests.debugging.planted import line_of, only


def test_state_that_is_rounded_in_place() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def run() -> None:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for state in optimizer.state.values():
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())  # rounded

    found = only(run, model)
    assert (found.grade, found.kind, found.place.line) == ("error", "rounded", line_of(__file__, "rounded"))
    assert found.what == "the optimizer's state is rounded to bfloat16 in place"
    assert found.cause.text.startswith("exp_avg_sq of weight is float32")
