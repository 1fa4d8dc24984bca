"""torchvision beside a CPU build of torch: its compiled operators are missing, and its import fails for that alone."""

import importlib.util
import sys

import torch


def import_torchvision() -> None:
    """Import torchvision if it is installed, with stand-ins for two operators that only its own wheel's torch has.

    timm needs torchvision, and transformers and torchmetrics trip over a half-imported one. The stand-ins are schemas
    without an implementation: calling `nms` still fails, with torch's own message.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
