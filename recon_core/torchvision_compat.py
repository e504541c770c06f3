"""Import piq where torch has no CUDA and torchvision was built for one.

With a CPU-only torch, `import torchvision` stops with "operator torchvision::nms does not exist":
its Python half registers kernels for two operators whose schemas live in the missing compiled
half. Defining the two schemas first makes everything that does not call them work, piq's metrics
included. This is done only on that exact error, and only here.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_MISSING_NMS = "operator torchvision::nms does not exist"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # a library's schemas vanish when it is collected


def import_torchvision() -> ModuleType:
    """The torchvision module, with the two operator schemas supplied if they are missing."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING_NMS not in str(error):
            raise
    if not _libraries:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            library.define(schema)
        _libraries.append(library)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


def import_piq() -> ModuleType:
    """The piq module, which needs torchvision to import although its metrics do not use it."""
    if "piq" not in sys.modules:
        import_torchvision()
    return importlib.import_module("piq")
