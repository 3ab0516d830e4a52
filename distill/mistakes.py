"""pydantic's errors as one line for each mistake: place, key, value, what is allowed, the nearest valid name."""

from __future__ import annotations

import json
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError

from distill.fields import Clash

Key = tuple[str | int, ...]


def explain(error: ValidationError, schema: dict[str, Any], data: dict[str, Any], places: dict[Key, str]) -> list[str]:
    """One line for each mistake.

    Args:
        error: what pydantic raised.
        schema: JSON schema of the model that raised it.
        data: what was validated.
        places: file and line (or the override) of each written key.
    """
    lines: dict[tuple[Key, str], str] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":
            continue  # it waits for a key that is wrong itself
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Clash):
            for name, message in cause.problems:
                key = (*detail["loc"], *name.split("."))
                lines[key, message] = line(key, places, message)
            continue
        key, value = _locate(detail["loc"], data, detail["type"] in ("extra_forbidden", "missing"))
        if detail["type"] == "extra_forbidden" or detail["loc"][-1] == "[key]":
            message = f"is no key here; {_nearest(key, schema)}"
        elif cause is not None:
            message = str(cause)
        elif detail["type"] == "missing" and isinstance(detail["loc"][-1], str):  # a number: a list that is too short
            message = "is missing"
        else:
            # A field of several types fails once for each type: the same line, kept once.
            message = f"= {json.dumps(value)}: allowed is {_allowed(_subschema(schema, key), schema)}"
        lines[key, message] = line(key, places, message)
    wrong = {key for key, _ in lines}
    inner = {key[:n] for key in wrong for n in range(len(key))}
    # A list with a wrong item is also reported as a whole; the item says more.
    return [line for (key, _), line in lines.items() if key not in inner]


def line(key: Key, places: dict[Key, str], message: str) -> str:
    """Place, key and message; a key that was not written itself has the place of one around it or inside it."""
    around = (places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places)
    inside = (place for other, place in places.items() if other[: len(key)] == key)
    place = next(around, next(inside, None))
    text = f"{brief(dotted(key), 100)} {brief(message, 600)}"
    return f"{brief(place, 160)}: {text}" if place else text


def brief(text: str, limit: int) -> str:
    """A long text without its middle: a value of a thousand items must not bury what is said about it."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def dotted(key: Key) -> str:
    """A key as a person writes it: ("eval", "k", 0) is eval.k[0]."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")


def _locate(loc: Key, data: Any, absent: bool) -> tuple[Key, Any]:
    """Cuts pydantic's location (which also names union branches) to a key of the data, and finds its value.

    Only of an unknown or a missing key (`absent`) the last part is no branch although the data does not hold it.
    """
    key: list[str | int] = []
    value = data
    for part in loc:
        inside = isinstance(value, dict) and isinstance(part, str) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            key.append(part)
            value = value[part]
        elif absent and isinstance(value, dict) and not isinstance(part, int):
            key.append(part)
            return tuple(key), None
    return tuple(key), value


def _resolve(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node


def _subschema(schema: dict[str, Any], key: Key) -> dict[str, Any]:
    """The JSON schema of one key; {} where there is none."""
    node = schema
    for part in key:
        node = _resolve(node, schema)
        for option in (_resolve(option, schema) for option in node.get("anyOf", [node])):
            if isinstance(part, str):
                child = option.get("properties", {}).get(part) or option.get("additionalProperties")
            else:
                child = (option.get("prefixItems") or [])[part : part + 1] or option.get("items")
                child = child[0] if isinstance(child, list) else child
            if isinstance(child, dict):
                node = child
                break
        else:
            return {}
    return _resolve(node, schema)


def _allowed(node: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a schema node allows, in words."""
    node = _resolve(node, schema)
    if "anyOf" in node:
        return " or ".join(_allowed(option, schema) for option in node["anyOf"])
    if "enum" in node or "const" in node:
        return " | ".join(node.get("enum", [node.get("const")]))
    kind = node.get("type")
    if kind == "array":
        if "prefixItems" in node:
            return f"a list of {len(node['prefixItems'])}: " + ", ".join(
                _allowed(item, schema) for item in node["prefixItems"]
            )
        some = "a non-empty list" if node.get("minItems") else "a list"
        return f"{some} of: {_allowed(node['items'], schema)}"
    if kind == "object":
        names = node.get("properties") or _resolve(node.get("propertyNames", {}), schema).get("enum", [])
        return f"{'one or more of the keys' if node.get('minProperties') else 'keys'} {', '.join(names)}"
    words = {
        "integer": "a whole number",
        "number": "a finite number",
        "string": "a text",
        "boolean": "true or false",
        "null": "null",
    }
    text = "a non-empty text" if node.get("minLength") else words[str(kind)]
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {node[name]}" for name, sign in bounds.items() if name in node]
    if "pattern" in node:
        limits.append("of letters, digits, . _ and -, starting with a letter or digit")
    return " ".join([text, " and ".join(limits)]).strip()


def _nearest(key: Key, schema: dict[str, Any]) -> str:
    """The valid key that a wrong one was most likely meant to be: in its own stage first, else in any."""
    stage = _subschema(schema, key[:-1])
    options = [_resolve(option, schema) for option in stage.get("anyOf", [stage])]
    here = {name: field for option in options for name, field in option.get("properties", {}).items()}
    # A mapping by loss or by group has no properties, only allowed names.
    here |= {
        name: {} for option in options for name in _resolve(option.get("propertyNames", {}), schema).get("enum", [])
    }
    there = {
        f"{name}.{inner}": field
        for name, part in schema["properties"].items()
        for inner, field in _resolve(part, schema).get("properties", {}).items()
    }
    wrong = str(key[-1]).lower().replace("_", " ")

    def likeness(name: str, field: dict[str, Any]) -> float:
        spellings = {name.rsplit(".", 1)[-1].replace("_", " "), str(field.get("title", "")).lower()}
        return max(SequenceMatcher(None, wrong, spelling).ratio() for spelling in spellings)

    best = max(here, key=lambda name: likeness(name, here[name]))
    other = max(there, key=lambda name: likeness(name, there[name]))
    if likeness(other, there[other]) > max(0.6, likeness(best, here[best])):
        return f"nearest is {other}; this stage has {', '.join(here)}"
    return f"nearest is {dotted((*key[:-1], best))}; this stage has {', '.join(here)}"
