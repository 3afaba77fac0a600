"""Latency curves: their shape, what is read off them, and that a machine is asked once. No timing is asserted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from jacobi_core.decoding.latency import LatencyCurve
from tasks import artifacts
from tasks.machine import hardware
from tasks.measure_latency import MeasureLatencyConfig, _kept, machine_identity, run
from tasks.stage import StageContext
from tests.tasks.tiny_stage import CONTEXT_LENGTH


def measure(folder, model, **changes):
    folder.mkdir(exist_ok=True)
    settings = {"tokens": [1, 2, 4], "batch_sizes": [1, 2], "contexts": [8], **changes}
    metrics = run(MeasureLatencyConfig(**settings), {"model": model}, folder, StageContext())
    return metrics, artifacts.read_json(folder / "latency.json")


def test_a_curve_per_batch_size_and_context(tmp_path, base_folder):
    metrics, found = measure(tmp_path / "out", base_folder, contexts=[8, 16])
    assert [(c["batch_size"], c["context"]) for c in found["curves"]] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    for curve in found["curves"]:
        assert curve["tokens"] == [1, 2, 4] and curve["seconds"] == sorted(curve["seconds"]) and curve["seconds"][0] > 0
        assert 1 <= curve["free_tokens"] <= 4 and 1 <= curve["knee"] <= 4 and curve["beside"] >= 0
        where = f"batch{curve['batch_size']}/context{curve['context']}"
        assert metrics[f"{where}/free_tokens"] == curve["free_tokens"] and metrics[f"{where}/knee"] == curve["knee"]
    assert found["shape"]["hidden_size"] == 32 and found["dtype"] == "float32" and found["device"] == "cpu"
    assert found["hardware"]["cores"] >= 1


def test_what_the_model_cannot_hold_is_left_out(tmp_path, base_folder):
    _, found = measure(tmp_path / "out", base_folder, contexts=[8, CONTEXT_LENGTH], batch_sizes=[1])
    assert [c["context"] for c in found["curves"]] == [8]


def test_one_machine_and_shape_is_measured_once(tmp_path, base_folder, monkeypatch):
    cache = str(tmp_path / "cache")
    first = measure(tmp_path / "a", base_folder, cache=cache)
    other = shutil.copytree(base_folder, tmp_path / "other")  # other weights would do as well
    monkeypatch.setattr("jacobi_core.hub.load_model", None)
    assert measure(tmp_path / "b", other, cache=cache) == first
    config = json.loads((other / "config.json").read_text())
    renamed = {"_name_or_path": "round7", "eos_token_id": 5, "dtype": "bfloat16", "transformers_version": "0"}
    (other / "config.json").write_text(json.dumps({**config, **renamed}))
    assert measure(tmp_path / "b2", other, cache=cache) == first  # nor would names, token ids and the dtype of the weights
    with pytest.raises(TypeError):  # another question has another answer
        measure(tmp_path / "c", other, cache=cache, contexts=[9])
    with pytest.raises(TypeError):
        measure(tmp_path / "d", other, cache=cache, dtype="float64")
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(TypeError):
        measure(tmp_path / "e", other, cache=cache)


def test_two_sizes_of_one_family_are_two_shapes(tmp_path, monkeypatch):
    """GPT-2 names its sizes n_embd, n_layer, n_head: what is not known by name counts too, also inside a nested config."""
    from transformers import GPT2Config

    found = []

    def stop(path, **_):
        found.append(path)
        raise KeyError

    monkeypatch.setattr("jacobi_core.hub.load_model", stop)
    small, large = GPT2Config(), GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    kept = set()
    for name, config in (("small", small.to_dict()), ("large", large.to_dict()), ("nested", {"text_config": large.to_dict()})):
        (tmp_path / name).mkdir()
        artifacts.write_json(tmp_path / name / "config.json", config)
        monkeypatch.setattr("tasks.measure_latency._kept", lambda config, subject: kept.add(json.dumps(subject["shape"], sort_keys=True)))
        with pytest.raises(KeyError):
            measure(tmp_path / f"{name}-out", tmp_path / name)
    assert len(kept) == 3 and not any("token_id" in shape for shape in kept)


def test_after_the_limit_nothing_wider_is_tried_but_two_widths_always_are(tmp_path, base_folder):
    _, found = measure(tmp_path / "out", base_folder, limit_s=1e-9)
    assert all(c["tokens"] == [1, 2] and c["free_tokens"] <= 2 for c in found["curves"])


def test_a_machine_is_told_without_torch():
    check = "import sys; from tasks.measure_latency import machine_identity as m; assert m()['cpu'] and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
    assert machine_identity()["cores"] == hardware()["cores"] and machine_identity()["cpu"] == hardware()["cpu"]


def test_threads_torch_and_device_are_part_of_the_machine(monkeypatch):
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)  # of the tests' own
    found = machine_identity()
    assert found["torch"] == torch.__version__ and found["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert machine_identity() == {**found, "torch_threads": "2"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert machine_identity() == {**found, "torch_threads": "2", "threads_sleep": True}


def test_a_curve_of_sleeping_threads_is_kept_apart(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    config, subject = MeasureLatencyConfig(cache=str(tmp_path)), {"hardware": hardware()}
    awake = _kept(config, subject)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert awake.parent == _kept(config, subject).parent and awake != _kept(config, subject)


def test_free_tokens_and_knee():
    roof = LatencyCurve((1, 2, 4, 8, 16, 32), (1.0, 1.0, 1.0, 1.0, 2.0, 4.0))  # flat up to 8, then an eighth per token
    assert roof.free_tokens(1.1) == 8 and roof.free_tokens(2.0) == 16 and roof.knee() == pytest.approx(8)
    flat = LatencyCurve((1, 2, 4), (1.0, 1.0, 1.05))
    assert flat.free_tokens(1.1) == 4
    assert LatencyCurve((1, 2, 4), (1.0, 1.0, 1.0)).knee() == 4  # not reached
    steep = LatencyCurve((1, 2, 4), (1.0, 2.0, 4.0))
    assert steep.free_tokens(1.1) == 1 and steep.knee() == pytest.approx(1)
    assert LatencyCurve((1,), (1.0,)).free_tokens(1.1) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": [2, 4]}, "tokens"),
        ({"tokens": [1, 4, 2]}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"contexts": [0]}, "contexts"),
        ({"batch_sizes": []}, "batch_sizes"),
        ({"free_ratio": 1.0}, "free_ratio"),
        ({"limit_s": 0}, "limit_s"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_bad_settings_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        MeasureLatencyConfig(**changes)
