"""The shape of the source tree: what a reviewer would otherwise have to notice by eye. Reads files only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jacobi_core", "tasks", "pipelines", "dashboards")

# Assembled, so that this file does not match itself.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:" + "|".join(("home", "Users", "root", "work", "opt")) + r")/[\w.-]")
FIELD = re.compile(r"^\s*(?:- )?[\w./@-]+:(?:\s|$)")


def tree() -> list[Path]:
    """Files git tracks or would add; every file below the root where this is no git checkout."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def machine_paths(text: str) -> list[str]:
    return [line for line in text.splitlines() if MACHINE_PATHS.search(line)]


def uncommented_fields(text: str) -> list[str]:
    """YAML fields with no comment line directly above. A defaults list, and what stands inside a list or block under a commented field, need none."""
    missing = []
    covered_below = None  # indent of the field whose nested lines are covered by its own comment (lists only)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        indent = len(line) - len(line.lstrip())
        if covered_below is not None and (indent > covered_below or (indent == covered_below and line.lstrip().startswith("- "))):
            continue
        covered_below = None
        if not FIELD.match(line):
            continue
        commented = number > 0 and lines[number - 1].lstrip().startswith("#")
        following = next((later for later in lines[number + 1 :] if later.strip() and not later.lstrip().startswith("#")), "")
        opens_list = line.rstrip().endswith(":") and following.lstrip().startswith("- ")
        if opens_list or re.search(r":\s*[|>][+-]?$", line):
            covered_below = indent
        if not commented and line.strip() != "defaults:":
            missing.append(f"{number + 1}: {line.strip()}")
    return missing


def imported(source: str) -> set[str]:
    """Top-level names of absolute imports, wherever they stand."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_no_machine_paths():
    found = {}
    for path in tree():
        try:
            lines = machine_paths(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if lines:
            found[str(path.relative_to(ROOT))] = lines
    assert not found


def test_every_config_field_has_a_comment():
    found = {str(path.relative_to(ROOT)): missing for path in (ROOT / "conf").rglob("*.yaml") if (missing := uncommented_fields(path.read_text()))}
    assert not found


def test_no_long_files():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in tree() if path.suffix == ".py"}
    assert lengths, "no Python file found"
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_every_package_folder_is_installed():
    """A folder without __init__.py works in this checkout and is missing from an installed copy."""
    folders = {path.parent for path in tree() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES}
    assert {str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "jacobi_core").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_method_imports_only_torch_and_transformers(path):
    """flash-attn is optional: where it is used at all, it is imported inside the function that needs it."""
    source = path.read_text()
    assert imported(source) - sys.stdlib_module_names <= {"jacobi_core", "torch", "transformers", "flash_attn"}
    assert not re.search(r"^(import|from) flash_attn", source, re.MULTILINE)


def test_the_checks_can_fail():
    assert machine_paths("x = '/" + "home/someone/run'") and machine_paths("/" + "work/main")
    assert not machine_paths("tests/data/x and https://example.org/home/page and ../work/x")
    assert uncommented_fields("# why\na: 1\nb: 2\n") == ["3: b: 2"]
    assert uncommented_fields("# why\na:\n  b: 2\n") == ["3: b: 2"]
    assert uncommented_fields("defaults:\n  - base\n  - _self_\n\n# why\nrounds:\n  - block_size: 16\n    window: 4\n") == []
    assert imported("def f():\n    import numpy as np\n    from ray.data import x\n    from . import y") == {"numpy", "ray"}
