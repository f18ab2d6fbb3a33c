"""The documentation holds together: the site needs no network, names exist, messages are real, scripts parse."""

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rmdm.config import Config, field_names
from tests import documented, workspace
from tests.documented import ROOT

SLURM, SKYPILOT = ROOT / "runs" / "slurm.sh", ROOT / "runs" / "skypilot.yaml"
# What sbatch's manual and SkyPilot's YAML reference (0.14) know, as far as people would use it here.
SBATCH_OPTIONS = {
    "account", "array", "chdir", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency", "error", "exclude",
    "exclusive", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "mail-type", "mail-user",
    "mem", "mem-per-cpu", "mem-per-gpu", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output",
    "partition", "qos", "requeue", "reservation", "signal", "time",
}  # fmt: skip
SKYPILOT_FIELDS = {
    "name": str, "workdir": str, "num_nodes": int, "resources": dict, "envs": dict, "secrets": dict, "volumes": dict,
    "file_mounts": dict, "setup": str, "run": str, "config": dict,
}  # fmt: skip
SKYPILOT_RESOURCES = {
    "infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type", "use_spot", "disk_size",
    "disk_tier", "network_tier", "image_id", "ports", "labels", "autostop", "any_of", "ordered", "job_recovery",
    "max_hourly_cost",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
    return out


def test_every_page_is_there(site):
    for page in documented.pages():
        if page != "README.md":
            assert (site / Path(page).relative_to("docs").with_suffix(".html")).is_file(), page
    assert (site / "rmdm.ipynb").is_file()
    assert not list(site.rglob("*.py"))


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")
    for page in site.rglob("*.html"):
        assert not loaded.findall(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_the_api_page_has_the_fields_of_a_request(site):
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in ("rmdm.load", "rmdm.model.Model.generate", "rmdm.request.Request.latent_temperature", "rmdm.errors"):
        assert f'id="{name}' in text, name


def test_search_works_without_a_server(site):
    assert "var __index" in (site / "search" / "search_index.js").read_text(encoding="utf-8")[:20]
    assert "theme/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_diagrams_are_those_that_the_script_draws():
    path = ROOT / "docs" / "img" / "diagrams.py"
    spec = importlib.util.spec_from_file_location("diagrams", path)
    assert spec is not None
    assert spec.loader is not None
    diagrams = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diagrams)
    for name, draw in diagrams.DIAGRAMS.items():
        drawn = (path.parent / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == draw().svg(), f"{name}.svg is out of date; run python docs/img/diagrams.py"


def test_the_paper_map_leads_to_things_that_exist():
    rows = re.findall(r"^\|(?! ?paper|---)(.*)\|$", documented.read("docs/paper-map.md"), flags=re.MULTILINE)
    assert len(rows) >= 20
    for row in rows:
        cells = re.split(r"(?<!\\)\|", row)
        owner: Any = None
        for name in re.findall(r"`([^`]+)`", cells[1]):
            found = find(name, owner)
            assert found is not None, f"docs/paper-map.md names {name}, which does not exist"
            owner = found


SECTIONS = {"2.1", "2.2", "3.1", "3.2", "3.3", "3.4", "4.1", "4.2", "4.3"}
"""Parts of the paper's sections. Its numbered equations are the bound, MeanFlow, and the bound given z_0."""


def test_the_parts_of_the_paper_that_are_cited_are_there_and_each_equation_is():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "rmdm").rglob("*.py")]
    brackets = [bracket for source in sources for bracket in re.findall(r"\[Paper [^\]]*\]", source)]
    paper_map = documented.read("docs/paper-map.md")
    assert len(brackets) >= 8
    for cited in (" ".join(brackets), paper_map):
        assert set(re.findall(r"§(\d\.\d)", cited)) <= SECTIONS
        assert set(re.findall(r"Equation (\d)", cited)) == {"1", "2", "3"}


def find(name: str, near: Any) -> Any:
    """A module, function, setting or file of the package by the name that the paper map gives it."""
    if "*" in name:
        return next((ROOT / "src" / "rmdm").glob(name), None)
    if name in field_names(Config):
        return Config
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(["rmdm", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        return attribute(value, parts[cut:])
    module = near if hasattr(near, "__file__") else sys.modules.get(getattr(near, "__module__", ""))
    is_argument = module is not None and re.search(rf"\b{name}: bool", inspect.getsource(module))
    return attribute(module, parts) or (module if is_argument else None)


def attribute(value: Any, names: list[str]) -> Any:
    """What the names lead to, or None."""
    return functools.reduce(lambda at, name: getattr(at, name, None), names, value)


def test_the_messages_of_troubleshooting_are_the_source_s():
    quoted = documented.messages("docs/troubleshooting.md")
    assert len(quoted) >= 30
    known = [*source_strings(), (ROOT / "Makefile").read_text(), "torch.OutOfMemoryError: CUDA out of memory"]
    for message in quoted:
        parts = [re.escape(part) for part in message.split("...")]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert any(pattern.search(one) for one in known), f"no source says {message!r} any more"
        assert len(message.replace(".", "")) >= 15


@functools.cache
def source_strings() -> list[str]:
    """Every string of the package; what an f-string fills in is left out."""
    found = []
    for file in (ROOT / "src" / "rmdm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_files_that_a_page_shows_are_the_repository_s():
    shown = [block for page in documented.pages() for block in documented.blocks(page) if block.title is not None]
    own = [block for block in shown if (ROOT / str(block.title)).is_file()]
    assert {block.title for block in own} == {"runs/slurm.sh", "runs/skypilot.yaml"}
    for block in own:
        assert block.body == (ROOT / str(block.title)).read_text(encoding="utf-8"), f"{block.place} is out of date"


def test_the_slurm_script_parses():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    if shutil.which("sbatch"):
        subprocess.run(["sbatch", "--test-only", str(SLURM), "owt-mdlm"], check=True)
    lines = SLURM.read_text(encoding="utf-8").splitlines()
    options = [line.removeprefix("#SBATCH --").partition("=") for line in lines if line.startswith("#SBATCH")]
    assert options
    for name, _, value in options:
        assert name in SBATCH_OPTIONS, name
        assert value == value.strip() != "", name
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first:]), "sbatch reads none after the first command"


def test_the_skypilot_file_has_fields_that_skypilot_knows():
    task = yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))
    for name, value in task.items():
        assert isinstance(value, SKYPILOT_FIELDS[name]), name
    assert set(task["resources"]) <= SKYPILOT_RESOURCES
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert all(path.startswith("/") for path in task["volumes"])
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workspace.Workspace]:
    """Text and small settings for what the launchers run."""
    return workspace.make(tmp_path_factory.mktemp("launch"))


def launched(script: list[str], place: workspace.Workspace, folder: Path, **environment: str) -> Path:
    """Run a launcher with stand-ins for its scheduler and two ranks on this machine; the run it made."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for name, body in {
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "scontrol": "echo 127.0.0.1",
    }.items():
        (stand_ins / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stand_ins / name).chmod(0o755)
    own = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "RMDM_BIN": str(Path(sys.executable).parent)}
    port = {"RMDM_PORT": str(workspace.free_port())}
    done = subprocess.run(
        script, cwd=place.folder, env=os.environ | own | port | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next((folder / "runs").glob("*/checkpoints/step-00000004/model/model.safetensors"))


@pytest.mark.slow
def test_the_slurm_script_trains(place, tmp_path):
    small = workspace.shrunk(["run", "owt-mdlm"], place, "")[2:]
    out = ["--data.dir", str(tmp_path / "data"), "--out", str(tmp_path / "runs/owt")]
    job = {"SLURM_JOB_NODELIST": "here", "SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "7"}
    assert launched(
        ["bash", str(SLURM), "owt-mdlm", *small, *out], place, tmp_path, SLURM_JOB_NUM_NODES="1", **job
    ).is_file()


@pytest.mark.slow
def test_the_skypilot_file_trains(place, tmp_path):
    task = yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))
    small = workspace.shrunk(["run", "owt-mdlm"], place, "")[2:]
    node = {"SKYPILOT_NODE_IPS": "127.0.0.1\n", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    node |= {"SKYPILOT_NODE_RANK": "0", "PRESET": "owt-mdlm", "FLAGS": shlex.join(small), "SHARED": str(tmp_path)}
    assert launched(["bash", "-c", task["run"]], place, tmp_path, **node).is_file()
