"""Import of piq where torch has no CUDA and torchvision was built for one.

There `import torchvision` stops with "operator torchvision::nms does not exist": its Python half
registers kernels for two operators whose schemas live in the missing compiled half. Defining the
two schemas first makes everything that does not call them work.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_MISSING_NMS = "operator torchvision::nms does not exist"
_SCHEMAS = [
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
]
_libraries: list[torch.library.Library] = []  # a library's schemas vanish when it is collected


def import_torchvision() -> ModuleType:
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
    if "piq" not in sys.modules:
        import_torchvision()
    return importlib.import_module("piq")
