"""The tracker's offline folder: config from the start, own step axis, honest finish status."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distill.schema import Track
from distill.track import NullTracker, Tracker, start

ROOT = Path(__file__).parents[2]
CONFIG = {"recipe": {"distill": {"lr": 1e-3}}, "provenance": {"git": {"sha": "abc"}}, "target": "tiny"}


def records(folder: Path) -> list[Any]:
    """Every record of the only W&B file below `folder` (LevelDB log format: 32 KiB blocks, 7-byte headers)."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts, out = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            out.append(record)
            parts = b""
    return out


def folded(items: Any) -> dict[str, Any]:
    """W&B's list of key/value updates as a dict."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def of(kind: str, found: list[Any]) -> list[Any]:
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with everything in it, ended by an interrupt."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "draft").mkdir()
    (folder / "draft" / "weights.bin").write_bytes(b"x" * 100)
    (folder / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'></svg>")
    tracker = start(Track(), folder, "20260101-000000", CONFIG)
    assert isinstance(tracker, Tracker)
    tracker.log(7, {"loss": 2.0})
    tracker.log(8, {"loss": 1.0})
    tracker.log(5, {"val/alpha": 0.5})  # logged late, at a lower step
    tracker.table(8, "val/domains", ["domain", "alpha"], [["code", 0.4]])
    tracker.figure(8, "curve", folder / "a.svg")
    tracker.artifact("draft", folder / "draft", {"step": 8})
    tracker.summary({"alpha": 0.5, "loss": 1.0})
    tracker.finish(130)
    return folder


def test_t54_config_is_there_from_the_start(folder: Path) -> None:
    kinds = [record.WhichOneof("record_type") for record in records(folder)]
    assert kinds.index("run") < kinds.index("history")
    config = folded(of("run", records(folder))[0].config.update)
    assert config["recipe"] == CONFIG["recipe"]
    assert config["provenance"]["git"]["sha"] == "abc"
    assert config["target"] == "tiny"


def test_t54_summary_holds_last_values(folder: Path) -> None:
    summary: dict[str, Any] = {}
    for record in of("summary", records(folder)):
        summary |= folded(record.update)
    assert summary["loss"] == 1.0
    assert summary["alpha"] == 0.5


def test_t55_rows_out_of_order_are_all_kept(folder: Path) -> None:
    rows = [folded(record.item) for record in of("history", records(folder))]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(7, 2.0), (8, 1.0)]
    assert [row["step"] for row in rows if "val/alpha" in row] == [5]


def test_t46_an_interrupted_run_is_not_marked_finished(folder: Path) -> None:
    assert [record.exit_code for record in of("exit", records(folder))] == [130]


def test_table_figure_and_artifact_are_recorded(folder: Path) -> None:
    names = {name for record in of("history", records(folder)) for name in folded(record.item)}
    assert {"val/domains/_type", "curve/_type"} <= names
    (artifact,) = [found for found in of("artifact", records(folder)) if found.type == "model"]
    assert [entry.path for entry in artifact.manifest.contents] == ["weights.bin"]


def test_offline_run_opens_no_socket_to_the_network(tmp_path: Path) -> None:
    """W&B's crash reporter looks up its server even in an offline run, unless it is told not to before the import."""
    if not (strace := shutil.which("strace")):
        pytest.skip("strace is not installed")
    if subprocess.run([strace, "-o", "/dev/null", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let strace attach to a process")
    code = (
        "import sys; from pathlib import Path; from distill.schema import Track; from distill.track import start\n"
        "t = start(Track(), Path(sys.argv[1]), 'x', {}); t.log(1, {'a': 1}); t.finish(0)"
    )
    trace = tmp_path / "trace"
    command = [strace, "-f", "-qq", "-e", "trace=connect", "-o", str(trace), sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    assert (tmp_path / "wandb").is_dir()
    assert not [line for line in trace.read_text().splitlines() if "AF_INET" in line]


def test_disabled_mode_neither_imports_wandb_nor_writes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from distill.schema import Track; from distill.track import start\n"
        "t = start(Track(mode='disabled'), Path(sys.argv[1]), 'x', {}); t.log(1, {'a': 1}); t.finish(0)\n"
        "assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)
    assert not list(tmp_path.iterdir())
    assert isinstance(start(Track(mode="disabled"), tmp_path, "x", {}), NullTracker)
