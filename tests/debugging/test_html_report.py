"""Reports as one HTML file: what text cannot show, drawn; well-formed, inert, needing nothing else."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from ampkit import autocast, debugging
from ampkit.__main__ import main


class Page(HTMLParser):
    """Refuses what does not nest; keeps tags and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """What each tool writes of a small run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor_file = tmp_path / "monitor.jsonl"

    def step(scale: float = 1.0) -> None:
        with autocast("cpu", dtype=torch.float16):
            loss = (model(torch.linspace(-1, 1, 48).view(4, 12)) * scale).float().square().mean()
        loss.backward()

    (tmp_path / "precision <b>.json").write_text(debugging.compare_precision(step, model).to_json())
    with debugging.TensorMonitor(model, torch.amp.GradScaler("cpu"), every=1, path=monitor_file) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            step()
            optimizer.step()
            monitor.step()
    with debugging.detect_nonfinite(model, on_found="record") as found:
        step(1e38)
    (tmp_path / "nonfinite.json").write_text(found.to_json())
    return [tmp_path / name for name in ("precision <b>.json", "monitor.jsonl", "nonfinite.json")]


def test_the_page_draws_what_the_reports_hold(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    assert main(["debug", "report", "--html", str(out), *map(str, files)]) == 1     # an inf was found
    text = out.read_text()
    page = Page(text)
    assert page.open == []
    assert page.headings == list(map(str, files))
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?:|url\(|@import|<b>", text)
    captions = re.findall(r"<figcaption>(.*?):? ", text)
    assert captions.count("error") == captions.count("headroom") - 2 == 2
    assert text.count("<circle") == page.tags.count("circle") > 12
    # a dot for each of the 3 sampled steps, named
    assert text.count("<title>step 2: ") >= 3
    assert "the loss is inf" in text
    for places in re.findall(r'points="(.*?)"', text):
        points = [tuple(map(float, one.split(","))) for one in places.split()]
        assert all(0 <= x <= 1000 and 0 <= y <= 200 for x, y in points)


def test_a_report_with_nothing_to_draw_is_its_text(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(debugging.compare_precision(lambda: torch.ones(1)).to_json())
    assert main(["debug", "report", "--html", str(tmp_path / "r.html"), str(tmp_path / "r.json")]) == 0
    assert Page((tmp_path / "r.html").read_text()).tags.count("svg") == 0
