"""Tool-call syntaxes: one small module for each family of models."""

from llamad_trio.chat.tools.format import TOOL_FORMATS, ToolFormat, detect_tool_format

__all__ = ["TOOL_FORMATS", "ToolFormat", "detect_tool_format"]
