"""Device tables: the shipped one is whole and names its sources; a broken one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.devices import DeviceTableError, find_device, read_devices
from distill.published import DEVICES


def test_the_shipped_table_names_a_source_for_every_device_and_assumption() -> None:
    devices = read_devices()
    assert {"h100-sxm", "h200", "a100-80gb", "l40s", "l4", "rtx-4090"} <= set(devices)
    for device in devices.values():
        assert device.source and 1e11 < device.bandwidth < 1e13 and 1e13 < device.flops < 1e16
    assumed = json.loads(DEVICES.read_text())["assumed"]
    assert all(entry["source"] for entry in assumed.values())


def test_an_unknown_device_is_named_with_its_nearest() -> None:
    with pytest.raises(DeviceTableError, match=r"trainer\.gpu = 'h100-smx' .* did you mean h100-sxm\?"):
        find_device("h100-smx", read_devices())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"devices": {}}, "no 'devices' in it"),
        ({"devices": {"x": {"memory_gb": 1}}}, r"devices\.x\.bandwidth_gb_s is None; it must be a number above 0"),
        ({"assumed": {"bandwidth_frac": 1.5}}, r"assumed\.bandwidth_frac is 1\.5; it must be a share"),
        ({"assumed": {"bandwith_frac": 0.5}}, r"unknown keys \['bandwith_frac'\]"),
    ],
)
def test_a_broken_table_is_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(json.loads(DEVICES.read_text()) | change))
    with pytest.raises(DeviceTableError, match=said):
        read_devices(path)


def test_a_device_without_a_source_is_refused(tmp_path: Path) -> None:
    data = json.loads(DEVICES.read_text())
    del data["devices"]["l4"]["source"]
    (tmp_path / "table.json").write_text(json.dumps(data))
    with pytest.raises(DeviceTableError, match=r"devices\.l4\.source is missing"):
        read_devices(tmp_path / "table.json")
    with pytest.raises(DeviceTableError, match="No such file"):
        read_devices(tmp_path / "none.json")
