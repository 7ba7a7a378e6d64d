"""Every tool's report by its schema, and all of them as one page: read, refused, looked at in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast, debugging
from ampkit.__main__ import main
from ampkit.debugging import html_report, report_file
from ampkit.debugging.operator_stats import OperatorTimes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TITLES = ["inf and NaN", "precision", "operators", "hashes", "hashes", "monitor", "search"]
VERY_LONG = "a_name_that_no_page_of_600_pixels_has_room_for_" * 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(VERY_LONG, nn.Linear(12, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.norm(getattr(self, VERY_LONG)(x)))


def step(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    with autocast("cpu", dtype=torch.float16):
        loss = (model(torch.linspace(-1, 1, 48).view(4, 12)) * scale).float().square().mean()
    loss.backward()
    return loss


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What each tool writes of a small step, as files."""
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("reports"), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = {}
    with debugging.detect_nonfinite(model, on_found="record") as found:
        step(model, 1e38)
    texts["nonfinite.json"] = found.to_json()
    texts["precision.json"] = debugging.compare_precision(lambda: step(model), model).to_json()
    with OperatorTimes(model) as times:
        step(model)
    texts["operators.json"] = times.stats.to_json()
    for name, scale in (("hashes.json", 1.0), ("hashes <b>.json", 2.0)):
        with debugging.record_hashes(model) as log:
            step(model, scale)
        texts[name] = log.to_json()
    for name, text in texts.items():
        (folder / name).write_text(text)
    with debugging.TensorMonitor(model, torch.amp.GradScaler("cpu"), every=1, path=folder / "monitor.jsonl") as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            step(model)
            optimizer.step()
            monitor.step()

    def evaluate(policy: Policy) -> float:
        with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16, policy=policy):
            out = model(torch.ones(2, 12)).float()
        return float("nan") if policy == Policy.default("cpu") else float(out.abs().max())

    debugging.search_policy(
        evaluate, model, passes=lambda value: value == value, policy=Policy.default("cpu"), log=folder / "search.jsonl"
    )
    return {path.name: path for path in (*(folder / name for name in texts), folder / "monitor.jsonl",
                                         folder / "search.jsonl")}


def rows(path: Path) -> list[dict]:
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def kind_of(path: Path) -> str:
    return rows(path)[0]["kind"].rpartition(".")[2]


def test_reports_are_by_their_schemas(files: dict[str, Path]) -> None:
    """In the opinion of `jsonschema` and of the reader that ships, which knows less."""
    jsonschema = pytest.importorskip("jsonschema")
    for path in files.values():
        schema = report_file.schema(kind_of(path))
        jsonschema.Draft202012Validator.check_schema(schema)
        for row in rows(path):
            jsonschema.Draft202012Validator(schema).validate(row)
            report_file.validate(row, schema, path.name)
    assert {kind_of(path) for path in files.values()} == {
        path.stem for path in (Path(report_file.__file__).parent / "schemas").glob("*.json")
    }


@pytest.mark.parametrize(("name", "path", "value"), [
    ("precision.json", ("operators", 0, "total"), "large"),
    ("operators.json", ("operators", 0, "calls"), 1.5),
    ("operators.json", ("shapes", 0, "sizes"), {"rows": "8"}),
    ("hashes.json", ("calls",), None),
    ("monitor.jsonl", ("outputs", "head", "broken"), "no"),
    ("monitor.jsonl", ("version",), "1"),
])
def test_what_is_not_by_the_schema_is_refused_by_both(files: dict[str, Path], name: str, path: tuple, value) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    row = rows(files[name])[0]
    at = row
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    schema = report_file.schema(kind_of(files[name]))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(row)
    with pytest.raises(ValueError, match="expected"):
        report_file.validate(row, schema, "it")


def test_every_report_is_read_back(files: dict[str, Path], tmp_path: Path) -> None:
    found = {name: report_file.read_any(path) for name, path in files.items()}
    assert json.loads(found["precision.json"].to_json()) == rows(files["precision.json"])[0]
    assert json.loads(found["hashes.json"].to_json()) == rows(files["hashes.json"])[0]
    assert found["nonfinite.json"] == report_file.read(files["nonfinite.json"])
    assert json.loads(found["operators.json"].to_json()) == rows(files["operators.json"])[0]
    assert str(found["monitor.jsonl"]) == "3 samples, of steps 0 to 2"
    assert "evaluations; best so far: " in str(found["search.jsonl"])
    cut = tmp_path / "cut.jsonl"
    cut.write_text(files["monitor.jsonl"].read_text()[:-40])
    assert str(report_file.read_any(cut)) == "2 samples, of steps 0 to 1"


@pytest.mark.parametrize(("text", "says"), [
    ("recipe", "is no JSON, nor lines of it"),
    ('{"kind": "recipe"}', "is no report of ampkit debug; expected 'kind': one of nonfinite, precision, operators"),
    ('{"kind": "ampkit.debugging.hashes", "version": "2.0"}', r"has version '2\.0'; this ampkit reads 1\.x"),
    ('{"kind": "ampkit.debugging.hashes", "version": "1.0"}', "lacks 'calls'"),
])
def test_a_file_that_is_none_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        report_file.read_any(file)


class Page(HTMLParser):
    """The open elements of a page that must close, its headings, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("href", "src", "srcset", "action", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


@pytest.fixture(scope="module")
def page(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "out.html"
    assert main(["debug", "report", "--html", str(out), *map(str, files.values())]) == 1     # a NaN was found
    return out


def test_the_page_has_every_section_and_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.headings == [*TITLES, "hashes that differ"]
    assert parsed.addresses == [f"#section-{number}" for number in range(1, 8)]
    assert not parsed.tags & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?:|url\(|@import|//cdn", text)
    assert "the first difference, after" in text
    assert "hashes &lt;b&gt;.json" in text
    assert "hashes <b>.json" not in text


def test_the_text_form_is_of_all_tools_too(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "report", *(str(files[name]) for name in ("operators.json", "hashes.json"))]) == 0
    printed = capsys.readouterr().out
    assert "dtype     operator" in printed
    assert re.search(r"hashes of \d+ results", printed)


def test_reports_of_nothing_make_a_page_too() -> None:
    empty = [
        debugging.NonFiniteReport(), debugging.PrecisionReport("float32"), debugging.OperatorStats(),
        debugging.HashLog(), report_file.SearchLines([]),
    ]
    text = html_report.page([(f"{number}.json", report) for number, report in enumerate(empty)])
    assert Page(text).headings == ["inf and NaN", "precision", "operators", "hashes", "search"]
    assert "nothing found" in text


def browse(page: Path, folder: Path, *flags: str, width: int) -> str:
    """What headless Chromium prints of a page."""
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        "--force-device-scale-factor=1", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", *flags,
    )
    command = [str(CHROMIUM), *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
class TestInABrowser:
    @pytest.mark.parametrize("width", [1400, 600])
    def test_nothing_is_wider_than_the_window(self, page: Path, tmp_path: Path, width: int) -> None:
        measured = tmp_path / "measured.html"
        script = (
            "<script>document.title = [document.documentElement.scrollWidth, innerWidth, "
            "[...document.querySelectorAll('section')].every(s => s.offsetHeight > 40)].join(' ')</script>"
        )
        measured.write_text(page.read_text().replace("</body>", script + "</body>"))
        dom = browse(measured, tmp_path, "--dump-dom", width=width)
        needed, available, seen = re.search(r"<title>(\d+) (\d+) (\w+)</title>", dom).groups()
        assert int(needed) <= int(available) == width
        assert seen == "true"
        assert Page(dom).headings == [*TITLES, "hashes that differ"]

    @pytest.mark.parametrize(("scheme", "dark"), [("1", False), ("0", True)])
    def test_the_ground_is_light_or_dark(self, page: Path, tmp_path: Path, scheme: str, dark: bool) -> None:
        image = pytest.importorskip("PIL.Image")
        file = tmp_path / "shot.png"
        browse(page, tmp_path, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={file}", width=600)
        shot = image.open(file).convert("L")
        assert shot.size == (600, 900)
        assert (shot.getpixel((3, 3)) < 60) is dark
        assert shot.getextrema()[1] - shot.getextrema()[0] > 150       # there is text on it
