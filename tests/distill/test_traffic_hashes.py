"""What a draft was trained on is named by files and hashes, never by places."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from distill.traffic_hashes import traffic_hashes


def test_traffic_hashes_name_files_and_not_places(tmp_path: Path) -> None:
    (tmp_path / "responses").mkdir()
    (tmp_path / "a.jsonl").write_text("{}\n")
    first = traffic_hashes(tmp_path, [str(tmp_path / "*.jsonl"), "bundled"])
    assert first["train"] == ["a.jsonl", "bundled"] and first["answers_sha256"] is None
    assert first["train_sha256"]["bundled"] is None and len(first["train_sha256"]["a.jsonl"]) == 64
    (tmp_path / "responses" / "rows-00000.jsonl").write_text("{}\n")
    assert len(traffic_hashes(tmp_path, "bundled")["answers_sha256"]) == 64
    assert str(tmp_path) not in json.dumps(first)


def test_traffic_files_of_one_name_and_with_brackets_are_hashed_each(tmp_path: Path) -> None:
    for number, folder in enumerate(("a", "b", "b/c")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(f'{{"prompt": "{number}"}}\n')
    (tmp_path / "a" / "train[1].jsonl").write_text("{}\n")
    (tmp_path / "a" / "train1.jsonl").write_text('{"prompt": "what the brackets would match"}\n')
    named = [f"{tmp_path}/*/train.jsonl", f"{tmp_path}/b/c/train.jsonl", f"{tmp_path}/a/train[1].jsonl", "owner/data"]
    found = traffic_hashes(tmp_path, [*named, f"{tmp_path}/b/gone.jsonl"])
    files = {"a/train.jsonl": "a", "b/train.jsonl": "b", "c/train.jsonl": "b/c", "train[1].jsonl": "a"}
    hashes = found["train_sha256"]
    assert set(hashes) == set(found["train"]) == {*files, "gone.jsonl", "owner/data"}
    for name, folder in files.items():
        data = (tmp_path / folder / Path(name).name).read_bytes()
        assert hashes[name] == hashlib.sha256(data).hexdigest(), name
    assert hashes["gone.jsonl"] is None and hashes["owner/data"] is None
