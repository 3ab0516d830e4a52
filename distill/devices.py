"""A device table: published peaks of devices that are not here, and the share of them that is reached. No torch.

Everything that comes of it is a prediction. What the makers state lies in `distill/published/devices.json`, each number
with its source; a table of one's own has the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from distill.published import DEVICES

NUMBERS = ("memory_gb", "bandwidth_gb_s", "bf16_tflops", "link_gb_s")
ASSUMED = ("bandwidth_frac", "compute_frac", "train_frac", "launch_us", "replay_us", "host_us")


class DeviceTableError(ValueError):
    """A device table that can not be used, or a device that is not in it."""


@dataclass(frozen=True)
class Device:
    """One device: peaks, and what of them is taken to be reached.

    Attributes:
        name: in the table.
        memory_bytes, bandwidth, flops, link: capacity; bytes per second of its memory; bf16 products per second (dense,
            an addition and a multiplication each count); bytes per second to the other devices, one way.
        bandwidth_frac, compute_frac: shares of these that a decoding step reaches.
        train_frac: share of `flops` that a training step's products reach.
        launch_ms: what the host takes for one eager operation.
        replay_ms: what one small operation takes inside a captured graph.
        host_ms: what the host takes between two cycles.
        captured: operations cost `replay_ms` each on top of the bytes; False: the host's `launch_ms` runs beside them.
        source: where the peaks are from.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link: float
    bandwidth_frac: float
    compute_frac: float
    train_frac: float
    launch_ms: float
    replay_ms: float
    host_ms: float
    captured: bool = True
    source: str = ""


def read_devices(path: Path = DEVICES) -> dict[str, Device]:
    """Reads a device table.

    Args:
        path: a JSON file like `distill/published/devices.json`.

    Returns:
        Devices by name, in the file's order.

    Raises:
        DeviceTableError: no such file, no JSON, a key that is missing or unknown, a number that is not above 0.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DeviceTableError(f"device table {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("devices"), dict) or not data["devices"]:
        raise DeviceTableError(f"device table {path}: no 'devices' in it; {DEVICES} shows the form")
    assumed = _numbers(path, "assumed", _values(data.get("assumed")), ASSUMED)
    found = {}
    for name, facts in data["devices"].items():
        numbers = _numbers(path, f"devices.{name}", _values(facts), NUMBERS)
        source = facts.get("source")
        if not isinstance(source, str) or not source:
            raise DeviceTableError(
                f"device table {path}: devices.{name}.source is missing: say where the peaks are from"
            )
        found[name] = Device(
            name,
            memory_bytes=numbers["memory_gb"] * 1e9,
            bandwidth=numbers["bandwidth_gb_s"] * 1e9,
            flops=numbers["bf16_tflops"] * 1e12,
            link=numbers["link_gb_s"] * 1e9,
            bandwidth_frac=assumed["bandwidth_frac"],
            compute_frac=assumed["compute_frac"],
            train_frac=assumed["train_frac"],
            launch_ms=assumed["launch_us"] / 1e3,
            replay_ms=assumed["replay_us"] / 1e3,
            host_ms=assumed["host_us"] / 1e3,
            source=source,
        )
    return found


def find_device(name: str, devices: Mapping[str, Device], where: str = "trainer.gpu") -> Device:
    """One device of a table.

    Raises:
        DeviceTableError: it is not there, with the nearest name.
    """
    if name in devices:
        return devices[name]
    near = get_close_matches(name, devices, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise DeviceTableError(f"{where} = {name!r} is not in the device table, which has {', '.join(devices)}{hint}")


def _values(part: Any) -> dict[str, Any]:
    """Numbers that stand alone or as {"value": ..., "source": ...}."""
    if not isinstance(part, dict):
        return {}
    return {key: value.get("value") if isinstance(value, dict) else value for key, value in part.items()}


def _numbers(path: Path, where: str, given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    wrong = sorted(set(given) - {*names, "source"})
    if wrong:
        raise DeviceTableError(f"device table {path}: {where} has unknown keys {wrong}; known are {', '.join(names)}")
    for name in names:
        value = given.get(name)
        most = 1.0 if name.endswith("_frac") else 1e9
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            allowed = "a share above 0 and at most 1" if most == 1 else "a number above 0"
            raise DeviceTableError(f"device table {path}: {where}.{name} is {value!r}; it must be {allowed}")
    return {name: float(given[name]) for name in names}
