"""What is installed is what is declared, and the packages carry everything that a user needs."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import triton
from packaging.requirements import Requirement
from packaging.version import Version

import fuser

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("recipes", "ops", "fused", "fuser", "bench")
INSTALLED_EXTRAS = ("test", "lint", "plots", "progress", "hf")


def test_every_requirement_is_pinned_and_allowed_by_its_pin():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): pin for name, pin in pins.items()}
    extras = (PROJECT["optional-dependencies"][name] for name in INSTALLED_EXTRAS)
    for requirement in map(Requirement, sum(extras, PROJECT["dependencies"])):
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(pin), f"{requirement} does not allow {pin}, the pin in constraints.txt."


@pytest.mark.triton
def test_triton_is_a_release_that_the_project_allows():
    (wanted,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "triton")
    assert wanted.specifier.contains(Version(triton.__version__))
    assert version("triton") == triton.__version__


def test_the_version_is_that_of_the_distribution():
    assert Version(fuser.__version__) == Version(version("fuser-ops"))


@pytest.mark.slow
def test_a_wheel_carries_every_module_and_type_marker(tmp_path):
    if Version(version("setuptools")) < Version("77"):
        pytest.skip("Building a wheel needs setuptools >= 77, as pyproject.toml says.")
    modules = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    # A copy, since a build leaves folders behind.
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert Version(fuser.__version__) == Version(wheel.name.split("-")[1])
    carried = set(zipfile.ZipFile(wheel).namelist())
    assert modules | {f"{package}/py.typed" for package in PACKAGES} <= carried
    assert not any(name.startswith("tests/") for name in carried)


def test_the_example_of_the_readme_runs(capsys):
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    exec(compile(example, "README.md", "exec"), {})
    assert "mxfp8" in capsys.readouterr().out.lower()


def test_graphs_and_schedules_keep_their_old_names_for_one_release():
    for module in (fuser.graph, fuser.schedule):
        for name in module.__all__:
            assert getattr(fuser, name) is getattr(module, name)
            assert name not in fuser.__all__
