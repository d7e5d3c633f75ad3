"""Conversion between Hugging Face folders and shards of neuronx-distributed, one tensor at a time and without torch.

``sm_llm.convert`` is this package and the function of its verb at once: calling it converts.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm_llm.convert.report import ConversionReport


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> ConversionReport:
        """See ``sm_llm.convert.api.convert``."""
        from sm_llm.convert.api import convert

        return convert(*arguments, **named)


sys.modules[__name__].__class__ = _CallablePackage
