"""Whether every machine of an existing cluster can do a run's work: asked of all of them at once, before the first stage.

Compared with this process: versions of Python and of the libraries that results or messages between processes rest on, and the source of this
project as each machine would import it. Shared with it: the folder that stages write to. Machines that join later are not asked.
Knows nothing about any one stage; `cluster` starts Ray.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cluster import start_ray
from tasks.stage import ClusterConfig, UserError

PACKAGES = ("torch", "transformers", "tokenizers", "ray", "pyarrow", "numpy")
SOURCES = ("jacobi_core", "tasks", "pipelines")
CREDENTIALS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")  # not passed on: Ray's dashboard shows what is
ANSWER_SECONDS = 180.0  # the first process on a machine may have to fetch the working directory
SHARE_SECONDS = 15.0  # NFS may show a new file late

log = logging.getLogger(__name__)

Facts = Mapping[str, Any]


def check_cluster(cluster: ClusterConfig, *, folder: Path, setting: str, modules: Sequence[str] = ()) -> None:
    """Joins cluster.address and asks every node.

    folder: where stages write, of which every node must see what this process writes and the other way round; setting: the field that names
    it. modules: of the user's own code, which workers import. Raises UserError: one line per mistake, naming node, difference and fix.
    """
    start_ray(cluster)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        probe.mkdir(parents=True)
        (probe / "driver").write_text(probe.name, encoding="utf-8")
        look = looking()
        here = look(None, "here", (*SOURCES,), PACKAGES, modules, CREDENTIALS, 0.0)
        answers, mistakes = _ask_all_nodes(look, (str(probe), SOURCES, PACKAGES, modules, CREDENTIALS, SHARE_SECONDS))
        mistakes += [mistake for name, there in answers.items() for mistake in _differences(name, here, there)]
        mistakes += _sharing(answers, probe, setting)
    except OSError as error:
        raise UserError(f"{setting}={folder}: cannot write there ({error.strerror}); choose a writable folder") from error
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    if mistakes:
        raise UserError("\n".join(mistakes))
    log.info("cluster: %d nodes checked: versions, source and %s are the same on all", len(answers), setting)


def _ask_all_nodes(look: Callable[..., Facts], arguments: tuple[Any, ...]) -> tuple[dict[str, Facts], list[str]]:
    """Node name -> what it said; and a line for the nodes that say nothing, and for each that cannot."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe, *rest = arguments
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            identity = node["NodeID"]
            there = NodeAffinitySchedulingStrategy(identity, soft=False)
            task = ray.remote(num_cpus=0)(look).options(scheduling_strategy=there, name="check_node")
            asked[task.remote(probe, identity, *rest)] = node
    ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
    answers, mistakes = {}, []
    if silent:
        names = ", ".join(_name(asked[task]) for task in silent)
        mistakes.append(f"cluster: {names}: no answer in {ANSWER_SECONDS:g} s; look at `ray status`, and take out or restart the node")
    for task in ready:
        try:
            answers[_name(asked[task])] = ray.get(task)
        except ray.exceptions.RayError as error:
            if _is_alive(asked[task]["NodeID"]):
                reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
                mistakes.append(f"cluster: {_name(asked[task])}: cannot run work of this project ({reason.strip()})")
            else:
                log.warning("cluster: %s has left while it was asked", _name(asked[task]))
    return answers, mistakes


def _name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"


def _is_alive(identity: str) -> bool:
    import ray

    return any(node["NodeID"] == identity and node["Alive"] for node in ray.nodes())


def _differences(name: str, here: Facts, there: Facts) -> Iterator[str]:
    """At most one line of versions and one of source for a node."""
    found = [
        f"{what} {_version(theirs)} (here {_version(here['versions'][what])})"
        for what, theirs in there["versions"].items()
        if _differs(what, here, there)
    ]
    if found:
        yield f"cluster: {name}: other versions than here: {', '.join(found)}; install the same on every node"
    missing = [source for source, found in there["sources"].items() if found is None]
    other = [source for source, found in there["sources"].items() if found is not None and found != here["sources"][source]]
    if missing or other:
        said = [f"{', '.join(missing)} cannot be imported"] * bool(missing) + [f"{', '.join(other)} is another version of the source"] * bool(other)
        yield f"cluster: {name}: {' and '.join(said)}; start with `ray job submit --working-dir .`, or install the same commit on every node"
    if there["modules"]:
        yield (
            f"noise_schedule: {', '.join(there['modules'])} cannot be imported on {name}; put it into the folder of "
            "`ray job submit --working-dir`, or install it on every node"
        )
    unset = [variable for variable in there["unset"] if variable not in here["unset"]]
    if unset:
        log.warning("cluster: %s: %s is set here and not there, so what workers report may reach MLflow late; set it there", name, ", ".join(unset))


def _differs(what: str, here: Facts, there: Facts) -> bool:
    """Builds of one version, as torch's for CPU and GPU, are the same."""
    return _version(here["versions"][what]).partition("+")[0] != _version(there["versions"][what]).partition("+")[0]


def _version(found: str | None) -> str:
    return found or "missing"


def _sharing(answers: Mapping[str, Facts], probe: Path, setting: str) -> list[str]:
    fix = f"put {setting} on a disk that all nodes mount at the same path (NFS, Lustre, EFS, ...), or leave those nodes out"
    blind = [f"{name} ({there['probe']})" for name, there in answers.items() if there["probe"] is not None]
    deadline = time.monotonic() + SHARE_SECONDS
    unseen = {name: there["node"] for name, there in answers.items() if there["probe"] is None}
    while unseen and time.monotonic() < deadline:
        unseen = {name: node for name, node in unseen.items() if not (probe / node).exists()}
        time.sleep(0.2 * bool(unseen))
    found = []
    if blind:
        found.append(f"{setting}={probe.parent}: not shared with {', '.join(blind)}: what this process writes there must be read there; {fix}")
    if unseen:
        found.append(f"{setting}={probe.parent}: what {', '.join(unseen)} writes there does not arrive here; {fix}")
    return found


def looking() -> Callable[..., Facts]:
    """What every node runs. A function inside a function is sent as code, so it runs where this project cannot be imported."""

    def look(
        probe: str | None, node: str, sources: Sequence[str], packages: Sequence[str], modules: Sequence[str], variables: Sequence[str], wait: float
    ) -> dict[str, Any]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import os
        import platform
        import time
        from pathlib import Path

        def version(package: str) -> str | None:
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                return None

        def spec(module: str) -> Any:
            try:
                return importlib.util.find_spec(module)
            except (ImportError, ValueError):
                return None

        def source(package: str) -> str | None:
            found = spec(package)
            if found is None or not found.submodule_search_locations:
                return None
            digest, root = hashlib.sha256(), Path(next(iter(found.submodule_search_locations)))
            for file in sorted(root.rglob("*.py")):
                digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
            return digest.hexdigest()

        def exchange(folder: Path) -> str | None:
            deadline = time.monotonic() + wait
            while True:
                try:
                    if (folder / "driver").read_text(encoding="utf-8") != folder.name:
                        raise OSError(0, "another file is there")
                    (folder / node).write_text(folder.name, encoding="utf-8")
                    return None
                except OSError as error:
                    if time.monotonic() >= deadline:
                        return error.strerror or type(error).__name__
                    time.sleep(0.2)

        return {
            "node": node,
            "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
            "sources": {package: source(package) for package in sources},
            "modules": [module for module in modules if spec(module) is None],
            "unset": [name for name in variables if name not in os.environ],
            "probe": None if probe is None else exchange(Path(probe)),
        }

    return look


def check_own_gpus(cluster: ClusterConfig) -> None:
    """Of a local cluster, without asking torch or Ray. Raises UserError where this machine is known to have fewer GPUs than the workers take."""
    there = gpus_here()
    needed = cluster.workers * cluster.gpus_per_worker
    if there is not None and needed > there:
        raise UserError(
            f"cluster.workers={cluster.workers} needs {needed:g} GPUs (cluster.gpus_per_worker={cluster.gpus_per_worker:g}), this machine "
            f"has {there}: lower cluster.workers, set cluster.gpus_per_worker=0 to compute on the CPU, or join a cluster (cluster.address)"
        )


def gpus_here() -> int | None:
    """NVIDIA GPUs that this process may use; None where that does not show (another kind of accelerator, another system)."""
    if not Path("/proc").is_dir() or Path("/dev/kfd").exists() or Path("/dev/dxg").exists():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",") if name.strip()]
        return len(named[: named.index("-1")]) if "-1" in named else len(named)
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))
