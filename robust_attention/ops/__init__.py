"""Attention as functions of q, k, v: one method a file. Importing this package registers them all."""

import importlib
import pkgutil

from robust_attention.ops._method import Method, methods, register

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")):
    importlib.import_module(f"{__name__}.{_module}")

__all__ = ["Method", "methods", "register"]
