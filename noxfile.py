"""The whole suite under every torch that ampkit supports: `make matrix`, or `make matrix TORCH=2.15.0`.

`nox --session wheel -- dist/ampkit-*.whl`, or `make wheel-test`, installs a built wheel with the oldest and the newest
torch and nothing else, and trains a step; without a file it builds one. Each version gets an environment of its own,
kept for the next time; one whose torch is a CUDA build takes five gigabytes and needs no GPU. `make matrix
ENVS=/folder` keeps them outside the checkout, `ARGS="-n 4"` goes to pytest. A run of the whole suite writes its row of
docs/install.md.
"""

import re
from pathlib import Path

import nox

# The newest release of each minor version.
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")

nox.needs_version = ">=2024.4"
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = False
nox.options.sessions = ["tests"]


@nox.session
@nox.parametrize("torch", VERSIONS)
def tests(session: nox.Session, torch: str) -> None:
    """Install one torch, with the triton that it brings, and ampkit; run the suite; note what came of it."""
    pins = Path("constraints-dev.txt").read_text(encoding="utf-8")
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text(re.sub(r"^(torch|triton)==.*\n", "", pins, flags=re.MULTILINE), encoding="utf-8")
    session.install("-c", str(constraints), f"torch=={torch}", "-e", ".[dev]")
    report = Path(session.create_tmp()) / "report.xml"
    codes = [0, 1]  # failed tests are a result too
    session.run("python", "-m", "pytest", f"--junitxml={report}", *session.posargs, success_codes=codes)
    if not any("tests" in argument or argument.startswith("-k") for argument in session.posargs):
        session.run("python", "docs/make_versions.py", str(report), *session.posargs)


_STEP = """
import sys, torch, ampkit
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = ampkit.GradScaler("cpu")
with ampkit.autocast("cpu", torch.float16):
    loss = model(torch.ones(3, 4)).float().square().mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
assert ampkit.__file__.startswith(sys.prefix), ampkit.__file__
print(ampkit.__version__, "from", ampkit.__file__, "with torch", torch.__version__, scaler.stats())
"""


@nox.session
@nox.parametrize("torch", [VERSIONS[0], VERSIONS[-1]])
def wheel(session: nox.Session, torch: str) -> None:
    """Install a built wheel by pip with one torch and what they require; import it and train a step elsewhere."""
    folder = Path(session.create_tmp())
    built = [str(Path(name).resolve()) for name in session.posargs]
    if not built:
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), ".")
        built = [str(path) for path in folder.glob("ampkit-*.whl")]
    session.install("--force-reinstall", "--no-deps", *built)
    session.install(f"torch=={torch}", *built)
    session.chdir(folder)
    session.run("python", "-I", "-W", "error", "-c", _STEP)  # -I: nothing is imported from the checkout
    session.run("python", "-I", "-m", "ampkit", "--version")
