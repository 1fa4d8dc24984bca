"""Configurations as JSON and back, and changed field by field."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import robust_attention as ra
from robust_attention._config import describe, digest, override, rebuild

CLASSES: dict[str, type] = {cls.__name__: cls for cls in ra.methods().values()}
CLASSES |= {cls.__name__: cls for cls in (ra.Huber, ra.Hampel, ra.Welsch, ra.Tukey)}


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    steps: int = 3
    name: str = "a"
    on: bool = False
    limit: int | None = None
    kinds: tuple[str, ...] = ("x",)


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    method: Any = field(default_factory=ra.MoM)


@pytest.mark.parametrize("method", [method for cls in ra.methods().values() for method in cls.examples()], ids=repr)
def test_every_method_comes_back_from_its_json(method: ra.Method) -> None:
    assert rebuild(json.loads(json.dumps(describe(method))), CLASSES) == method


def test_unknown_classes_and_fields_fail_clearly() -> None:
    with pytest.raises(ValueError, match='"is" must be one of'):
        rebuild({"is": "Path", "x": "/"}, CLASSES)
    with pytest.raises(ValueError, match="KDE has no field colour"):
        rebuild({"is": "KDE", "colour": 1}, CLASSES)
    with pytest.raises(ValueError, match="must hold dataclasses"):
        describe({"a": object()})


def test_digest_tells_configurations_apart() -> None:
    assert digest(Outer()) == digest(Outer()) != digest(Outer(inner=Inner(steps=4)))
    # Equal fields of different classes are different configurations.
    assert digest(ra.Huber(0.3)) != digest(ra.Hampel(0.3))
    assert digest(Path("a")) == digest("a")


def test_override_reaches_every_kind_of_field() -> None:
    changed = override(
        Outer(),
        {
            "inner.rate": "2",
            "inner.steps": 7,
            "inner.name": "b",
            "inner.on": "true",
            "inner.limit": "5",
            "inner.kinds": '["y", "z"]',
            "method.blocks": 3,
            "method.draw": "partition",
        },
    )
    inner = Inner(rate=2.0, steps=7, name="b", on=True, limit=5, kinds=("y", "z"))
    assert changed == Outer(inner=inner, method=ra.MoM(blocks=3, draw="partition"))
    assert isinstance(changed.inner.rate, float)
    whole = override(Outer(), {"method": {"is": "RKDE", "loss": {"is": "Huber", "a": 0.3}}}, CLASSES)
    assert whole.method == ra.RKDE(ra.Huber(0.3))
    assert override(changed, {"inner.limit": "null"}).inner == replace(inner, limit=None)
    assert override(changed, {"inner.limit": "none"}).inner == replace(inner, limit=None)
    assert override(changed, {"inner.kinds": '"z"'}).inner == replace(inner, kinds=("z",))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("inner.speed", 1, "no 'speed'.*Inner has rate, steps"),
        ("inner.rate.x", 1, "no 'x'.*which has no fields"),
        ("inner.steps", "many", "inner.steps must be like 3, got 'many'"),
        ("inner.steps", "0.5", "inner.steps must be like 3, got 0.5"),
        ("inner.steps", "true", "inner.steps must be like 3, got True"),
        ("inner.on", "1", "inner.on must be like False, got 1"),
        ("inner.kinds", '{"a": 3}', "inner.kinds must be like"),
    ],
)
def test_a_wrong_override_fails_clearly(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(Outer(), {path: value})
