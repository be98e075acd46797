"""Imports go one way, and what plans or helps does not load PyTorch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "ambidex"

BASE = {
    "cgroups",
    "checkpoint_names",
    "errors",
    "config",
    "logs",
    "metrics",
    "option_types",
    "options",
    "options_accelerator",
    "options_file",
    "options_known",
    "options_table",
    "options_variables",
    "request",
    "sysfs",
}
DATA_PLANE = {
    "memory",
    "device",
    "kernels",
    "quant",
    "kv",
    "layers",
    "models",
    "weights",
}

#: Package -> packages that it may import, besides the base and itself (docs/architecture.md).
ALLOWED: dict[str, set[str]] = {
    "memory": {"weights.headers"},
    "kernels": set(),
    "device": {"memory", "kernels"},
    "quant": {"kernels"},
    "kv": {"memory", "device"},
    "layers": {"device", "kernels", "quant", "kv"},
    "models": {"layers", "memory.architectures"},
    "weights": {"memory", "device", "quant"},
    "runner": DATA_PLANE,
    "engine": {"memory", "kv", "runner", "weights.headers"},
    "llm": {"engine"},
    "server": {"engine"},
    "entrypoints": {"cli"},
}

#: May not import torch, not even through another module.
WITHOUT_TORCH = [
    "ambidex",
    "ambidex.cli",
    "ambidex.config",
    "ambidex.device.host_nodes",
    "ambidex.device.node_probe",
    "ambidex.device.profile_cache",
    "ambidex.engine.scheduler",
    "ambidex.errors",
    "ambidex.kernels.cpu.levels",
    "ambidex.kernels.cpu.numa",
    "ambidex.kernels.cpu.topology",
    "ambidex.kv.block",
    "ambidex.kv.block_manager",
    "ambidex.kv.block_pool",
    "ambidex.checkpoint_names",
    "ambidex.memory.architectures",
    "ambidex.memory.compression",
    "ambidex.memory.cost_model",
    "ambidex.memory.expert_cache",
    "ambidex.memory.hardware_table",
    "ambidex.memory.host",
    "ambidex.memory.judge",
    "ambidex.memory.ledger",
    "ambidex.memory.model_shape",
    "ambidex.memory.nodes",
    "ambidex.memory.operations",
    "ambidex.memory.placement",
    "ambidex.memory.planner",
    "ambidex.memory.public_shapes",
    "ambidex.memory.profile",
    "ambidex.memory.proposals",
    "ambidex.memory.rates",
    "ambidex.memory.sizing",
    "ambidex.memory.split",
    "ambidex.memory.step_memory",
    "ambidex.memory.strain",
    "ambidex.memory.weight_patterns",
    "ambidex.memory.weight_places",
    "ambidex.metrics",
    "ambidex.options",
    "ambidex.request",
    "ambidex.runner.decision",
    "ambidex.server.app",
    "ambidex.sysfs",
    "ambidex.weights.headers",
    "ambidex.weights.hub",
    "ambidex.weights.shape",
]


def imports_of(path: Path) -> list[str]:
    """Modules of this package that a file imports, inside functions too, type checks apart."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name.removeprefix("ambidex.") for name in found if name.startswith("ambidex.")]


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if package in ("__init__", "__main__", "cli"):
        return
    allowed = ALLOWED.get(package, set()) if package not in BASE else set()
    wrong = [
        name
        for name in imports_of(path)
        if (target := name.split(".")[0]) not in BASE | {package}
        and target not in allowed
        and ".".join(name.split(".")[:2]) not in allowed
    ]
    assert not wrong, f"{path.relative_to(SOURCE)} may not import {wrong}"


def test_only_one_file_of_kv_uses_torch() -> None:
    users = [
        path.name for path in (SOURCE / "kv").glob("*.py") if "import torch" in path.read_text()
    ]
    assert users == ["cache.py"]


def test_policy_and_front_end_do_not_load_torch() -> None:
    code = "import sys\n" + "\n".join(
        f"import {module}\nassert 'torch' not in sys.modules, {module!r}"
        for module in WITHOUT_TORCH
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_device_is_named_outside_its_folder() -> None:
    for package in ("layers", "models", "runner", "kv", "engine"):
        for path in (SOURCE / package).rglob("*.py"):
            assert "cuda" not in path.read_text().lower(), path


def test_no_pickle() -> None:
    for path in modules():
        assert not [
            name
            for name in ast.walk(ast.parse(path.read_text()))
            if isinstance(name, ast.Name) and name.id in ("pickle", "cloudpickle", "dill")
        ]


def test_the_core_stays_readable() -> None:
    core = [
        "llm.py",
        "engine/engine.py",
        "engine/scheduler.py",
        "kv/block_manager.py",
        "runner/model_runner.py",
        "models/llama.py",
        "layers/attention.py",
        "kernels/reference.py",
    ]
    assert sum(len((SOURCE / name).read_text().splitlines()) for name in core) <= 2270
