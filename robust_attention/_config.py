"""Configurations are frozen dataclasses; here they become JSON, come back from it, and change field by field."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C")


def describe(config: Any) -> Any:
    """A configuration as plain JSON; a dataclass says which one it is under "is"."""
    if is_dataclass(config) and not isinstance(config, type):
        values = {f.name: describe(getattr(config, f.name)) for f in fields(config) if f.init}
        return {"is": type(config).__name__, **values}
    if isinstance(config, list | tuple):
        return [describe(part) for part in config]
    if isinstance(config, Mapping):
        return {str(key): describe(value) for key, value in config.items()}
    if isinstance(config, Path | str):
        return str(config)
    if config is None or isinstance(config, bool | int | float):
        return config
    raise ValueError(f"a configuration must hold dataclasses, lists, texts and numbers, got {config!r}")


def rebuild(record: Any, classes: Mapping[str, type]) -> Any:
    """Undo `describe`, with the named classes alone: nothing else that a file says is ever made."""
    if isinstance(record, dict) and "is" in record:
        name = record["is"]
        if name not in classes:
            raise ValueError(f'"is" must be one of {", ".join(sorted(classes))}, got {name!r}; the file is not ours')
        given = {key: rebuild(value, classes) for key, value in record.items() if key != "is"}
        known = {f.name for f in fields(classes[name]) if f.init}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"{name} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return classes[name](**given)
    if isinstance(record, dict):
        return {key: rebuild(value, classes) for key, value in record.items()}
    if isinstance(record, list):
        return tuple(rebuild(part, classes) for part in record)
    return record


def digest(config: Any) -> str:
    """Sixteen hex digits that two configurations share only if they are equal."""
    return hashlib.sha256(json.dumps(describe(config), sort_keys=True).encode()).hexdigest()[:16]


def override(config: C, settings: Mapping[str, Any], classes: Mapping[str, type] | None = None) -> C:
    """Change fields by their paths: `{"fit.epochs": 3, "method.beta": 1.2}`; texts are read as JSON where they are."""
    for path, value in settings.items():
        config = _set(config, path, path.split("."), value, classes or {})
    return config


def _set(config: Any, path: str, names: list[str], value: Any, classes: Mapping[str, type]) -> Any:
    name, *rest = names
    known = [f.name for f in fields(config) if f.init] if is_dataclass(config) else []
    if name not in known:
        has = f"; {type(config).__name__} has {', '.join(known)}" if known else ", which has no fields"
        raise ValueError(f"{path!r} names no field of the configuration (no {name!r}){has}")
    now = getattr(config, name)
    new = _set(now, path, rest, value, classes) if rest else _parsed(path, now, value, classes)
    changed: Any = replace(config, **{name: new})
    return changed


def _parsed(path: str, now: Any, value: Any, classes: Mapping[str, type]) -> Any:
    if isinstance(value, str) and value.lower() == "none":
        value = None
    if isinstance(value, str) and (not isinstance(now, str) or value.startswith('"')):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            if now is not None and not isinstance(now, tuple):
                raise ValueError(f"{path} must be like {describe(now)!r}, got {value!r}") from None
    value = rebuild(value, classes)
    if now is None or value is None or is_dataclass(value):
        return value
    if isinstance(now, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(now, tuple) and isinstance(value, bool | int | float | str):
        value = (value,)  # one of several
    kind = str if isinstance(now, str) else type(now)  # a str of ours may be of a class of its own
    if not isinstance(value, kind) or isinstance(now, bool) != isinstance(value, bool):
        raise ValueError(f"{path} must be like {describe(now)!r}, got {value!r}")
    return value
