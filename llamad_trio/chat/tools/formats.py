"""The tool-call syntaxes there are, and which of them a template uses."""

from __future__ import annotations

from collections.abc import Mapping

import jinja2

from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.hermes import Hermes
from llamad_trio.chat.tools.lfm2 import Lfm2
from llamad_trio.chat.tools.llama3 import Llama3
from llamad_trio.chat.tools.mistral import Mistral

_CLASSES = (Hermes, Llama3, Mistral, Lfm2)

TOOL_FORMATS: Mapping[str, ToolFormat] = {cls.name: cls() for cls in _CLASSES}
"""Every format by its name, for a request that names one."""


def detect_tool_format(template_source: str) -> ToolFormat | None:
    """Return the syntax in which a template's model calls tools.

    `None` if the template takes no `tools`, or has a syntax that is not known here.
    """
    if not _reads_tools(template_source):
        return None
    found = (cls.detect(template_source) for cls in _CLASSES)
    return next((tool_format for tool_format in found if tool_format is not None), None)


def _reads_tools(template_source: str) -> bool:
    """Whether `tools` is a name in the template, not only a word that it writes."""
    try:
        tokens = list(jinja2.Environment().lex(template_source))
    except jinja2.TemplateError:
        return False
    return any(kind == "name" and value == "tools" for _, kind, value in tokens)
