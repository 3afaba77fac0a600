"""No password or token of an address reaches a file, a log line or the terminal; whoever connects has it all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.credentials import redact_files, redacted, redacted_values, restored
from pipelines.job_record import JOB, JobRecord
from pipelines.tracking import channel as channels
from pipelines.tracking.channel import Channel, left_behind
from pipelines.tracking.mlflow_runs import first_line
from pipelines.tracking.tracker import ui_command

ADDRESSES = {
    "http://ann:geheim@tracker:5000": "http://ann:...@tracker:5000",
    "http://:geheim@tracker": "http://:...@tracker",
    "https://geheim@tracker/path": "https://...@tracker/path",
    "postgresql+psycopg2://ann:ge@heim@host/db": "postgresql+psycopg2://ann:...@host/db",
    "postgresql://ann:ge/heim@host/db": "postgresql://ann:...@host/db",
    "mysql://ann:1234@host/db": "mysql://ann:...@host/db",
    "s3://bucket/f?region=eu&secret_key=geheim&scheme=http": "s3://bucket/f?region=eu&secret_key=...&scheme=http",
    "a: 'mysql://ann:geheim@host/db'\nb: http://host:80/ c@d": "a: 'mysql://ann:...@host/db'\nb: http://host:80/ c@d",
}
HARMLESS = (
    *("http://tracker:5000", "http://tracker:5000/#/experiments/1@2", "sqlite:////srv/mlflow.db", "postgresql://ann@host/db"),
    *("abfs://container@account.net/x", "s3://b/f?endpoint_override=h:9000&scheme=http", "someone@example.org: 12"),
)
URI = "http://ann:geheim@127.0.0.1:9"


@pytest.mark.parametrize(("address", "shown"), ADDRESSES.items())
def test_credentials_are_hidden_once_and_for_all(address: str, shown: str):
    assert redacted(address) == redacted(shown) == shown
    assert redacted_values({"a": [address, {"b": (address, 1.5, None)}]}) == {"a": [shown, {"b": [shown, 1.5, None]}]}
    assert restored(shown, address) == address and restored("sqlite:///x", address) == "sqlite:///x" and restored(shown, None) == shown


@pytest.mark.parametrize("address", HARMLESS)
def test_what_holds_none_stays_as_it_is(address: str):
    assert redacted(address) == address


def test_what_is_written_and_said_holds_none(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels, "_outages", {})
    JobRecord(tmp_path, 0, [f"paths.tracking_uri={URI}"], config={"paths": {"tracking_uri": URI}}, error=f"no {URI}").save()
    channel = Channel(URI, "experiment", tmp_path / "waiting" / "run.jsonl")
    assert channel.send("log_text", run="pending-x", text=f"tracking_uri: {URI}\n", name="config.yaml") is None  # nobody listens there
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(f"- paths.tracking_uri={URI}\n")
    redact_files((tmp_path / ".hydra").glob("*.yaml"))
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} | {"log": caplog.text}
    assert {JOB, "run.jsonl", "overrides.yaml", "log"} <= set(texts)
    assert all("geheim" not in text for text in texts.values())
    assert all("http://ann:...@127.0.0.1:9" in texts[name] for name in (JOB, "run.jsonl", "overrides.yaml", "log"))
    assert ui_command(URI) == "http://ann:...@127.0.0.1:9" and "geheim" not in ui_command("mysql://ann:geheim@host/db")
    assert first_line(OSError(f"{URI} is away")) == "http://ann:...@127.0.0.1:9 is away"


def test_waiting_records_go_to_whoever_knows_the_whole_address(tmp_path: Path):
    Channel(URI, "experiment", tmp_path / "run.jsonl").backlog.append({"write": "end_run"})
    assert [found.tracking_uri for found in left_behind(tmp_path)] == ["http://ann:...@127.0.0.1:9"]
    assert [found.tracking_uri for found in left_behind(tmp_path, URI)] == [URI]
    assert [found.tracking_uri for found in left_behind(tmp_path, "http://127.0.0.1:9")] == ["http://ann:...@127.0.0.1:9"]
