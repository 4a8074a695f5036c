"""Chat templates: a conversation in, the prompt's text out; and how they mark reasoning.

A model brings its template as Jinja source written for Hugging Face's transformers.  The
source came with a downloaded file and is not trusted: it runs in the sandbox, on copies of
the caller's data, and its time and all that it makes are bounded.
"""

from __future__ import annotations

import datetime as dt
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

import attrs
import jinja2

from llamad_trio.chat.meter import FULL, RenderLimits, current_meter, metering
from llamad_trio.chat.sandbox import Sandbox
from llamad_trio.core.errors import ProtocolError, UnsupportedFeature

# A template may quote the whole conversation in its error message.
_MAX_REASON_CHARS = 1000


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(current_meter().text(message))


def _strftime_now(fmt: str) -> str:
    current_meter().check(256 * len(fmt))  # C's own has widths; Python stops it there
    return dt.datetime.now().strftime(fmt)


# Shared by all templates and threads.
_SANDBOX = Sandbox({"raise_exception": _raise_exception, "strftime_now": _strftime_now})


@attrs.frozen
class ChatTemplate:
    """A model's chat template, compiled once.

    `bos_token` and `eos_token` are the texts of the model's special tokens.  A
    template that wants the first one in the prompt writes it itself, so a
    rendered prompt that begins with it must not be given another.

    Raises `UnsupportedFeature` when the source does not compile, or is too long
    or too deeply nested for a chat template.
    """

    source: str = attrs.field(repr=False)
    bos_token: str = attrs.field(kw_only=True)
    eos_token: str = attrs.field(kw_only=True)
    _compiled: jinja2.Template = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        try:
            compiled = _SANDBOX.compile_source(self.source)
        except Exception as error:
            raise UnsupportedFeature("chat template", _describe(error)) from error
        object.__setattr__(self, "_compiled", compiled)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        limits: RenderLimits = FULL,
        **variables: object,
    ) -> str:
        """Return the prompt for `messages`.

        With `add_generation_prompt` the prompt ends where the assistant's answer begins.
        `variables` are what else this template reads (`tools`, `documents`,
        `enable_thinking`, …); messages and variables are data as JSON has it, and the
        template sees copies.  Any number of threads may render at the same time.

        Raises:
            ProtocolError: the template refuses the messages, which it says in its own
                words, fails on them, or makes more than `FULL` allows.
            TemplateTimeout: it needs more than `limits`; with `FULL` it may succeed.
        """
        try:
            context = {
                # Templates written for transformers count on these two being there, if only as
                # none: `tools is not none` is true of an undefined name.
                "tools": None,
                "documents": None,
                "bos_token": self.bos_token,
                "eos_token": self.eos_token,
                **{name: _as_json_data(value, name) for name, value in variables.items()},
                "messages": _as_json_data(messages, "messages"),
                "add_generation_prompt": add_generation_prompt,
            }
            return self._run(context, limits)
        except ProtocolError:
            raise
        except _Refusal as refusal:
            reason = f"the chat template refused the messages: {_describe(refusal)}"
            raise ProtocolError(reason) from refusal
        except Exception as error:
            raise ProtocolError(f"the chat template failed: {_describe(error)}") from error

    def _run(self, variables: dict[str, object], limits: RenderLimits) -> str:
        context = self._compiled.new_context(variables)
        try:
            with metering(limits) as meter:
                # Not `generate`, which rewrites an error's traceback, frame by frame.
                return meter.join(self._compiled.root_render_func(context))
        except Exception as error:
            # Whoever keeps the error must not keep the template's values, which may be huge.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            context.vars.clear()  # macros and the context hold each other


def _as_json_data(value: object, where: str) -> object:
    """Copy `value` into the built-in types of JSON; `where` names it in an error.

    Whatever a template could do to it, the caller's data stays as it is; and the caller's
    own types have no say in what a template sees.
    """
    try:
        return json.loads(json.dumps(value, default=_as_builtin))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{where} is not JSON data: {error}") from error


def _as_builtin(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"there is {type(value).__name__} in it")


def _describe(error: Exception) -> str:
    """A short text about `error`, with its type where the message alone would not explain."""
    message = str(error)
    if not isinstance(error, jinja2.TemplateError):
        message = f"{type(error).__name__}: {message}"
    if isinstance(error, jinja2.TemplateSyntaxError):
        message = f"line {error.lineno}: {error.message}"
    return message if len(message) <= _MAX_REASON_CHARS else f"{message[:_MAX_REASON_CHARS]}…"


@attrs.frozen
class ReasoningTags:
    """The texts around a model's reasoning, which may be control tokens of its vocabulary."""

    open: str
    close: str

    def end_of(self, prompt: str) -> str | None:
        """The tag that a prompt ends in, white space aside; `None` if it ends in neither.

        After the opening one the reply begins inside reasoning; after the closing one there
        shall be none.
        """
        end = prompt.rstrip()
        return next((tag for tag in (self.open, self.close) if end.endswith(tag)), None)


_KNOWN_REASONING = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
)


def detect_reasoning(template_source: str) -> ReasoningTags | None:
    """Return the tags that the template sets around reasoning; `None` if it knows none.

    A template need not name both: one that only cuts old reasoning out of the
    conversation looks for the closing tag, one that only begins it writes the
    opening tag.
    """
    for tags in _KNOWN_REASONING:
        if tags.open in template_source or tags.close in template_source:
            return tags
    return None
