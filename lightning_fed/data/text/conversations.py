"""The conversation in a record of instruction data, in any of the usual forms."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_fed.errors import FederationError, require

Columns = dict[str, list[str] | str]
"""The columns of each role's message; several are joined by a blank line."""

SHAREGPT = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of the roles."""

SYSTEM = ("system", "developer")

FORMS = (
    "messages (or ShareGPT's conversations), prompt and completion, or instruction, input and output; or name them in columns "
    "({user: question, assistant: answer})"
)

Message = dict[str, Any]
"""With ``role`` and ``content``, as templates take it."""


class Conversation(NamedTuple):
    """A conversation, and which part of it may be trained.

    Args:
        messages: at least one; the last is an answer. If they are no messages, a prompt and its completion, as texts.
        start: number of messages that form the prompt, if everything after it is trained. None: the roles decide.
        variables: further variables of the template: ``tools`` (a list of objects), and those of ``chat_template_kwargs``.
    """

    messages: Sequence[Message | str]
    start: int | None = None
    variables: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_chat(self) -> bool:
        """Whether a template formats it."""
        return not isinstance(self.messages[0], str)


def conversation_of(fields: Mapping[str, Any], columns: Columns | None, where: str) -> Conversation:
    """The conversation of a record with these fields. The columns of each role's messages are given, or (None) the names of the
    fields determine the form. Fields ``tools`` and ``chat_template_kwargs`` are for the template.

    Raises:
        FederationError: for a record without an answer, roles in the wrong order, an unknown form, or wrong tools; begins with
            ``where``, file and record.
    """
    conversation, variables = _messages_of(fields, columns, where), _variables(fields, columns, where)
    require(
        conversation.is_chat or not variables,
        f"{where} has {' and '.join(variables)} for a chat template, but texts without one: give them as messages.",
    )
    return conversation._replace(variables=variables)


def _variables(fields: Mapping[str, Any], columns: Columns | None, where: str) -> dict[str, Any]:
    """Variables of the template, except for columns that are messages."""
    used = {name for names in (columns or {}).values() for name in ([names] if isinstance(names, str) else names)}
    given = {name: fields.get(name) for name in ("tools", "chat_template_kwargs") if name not in used}
    tools, others = given.get("tools"), given.get("chat_template_kwargs") or {}
    got = (
        f"{where} has the tools {str(tools)[:60]!r}: expected a list of objects, the functions' JSON schemas, or that list as JSON."
    )
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise FederationError(got) from error
    require(not tools or (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)), got)
    require(
        isinstance(others, Mapping),
        f"{where} has the chat_template_kwargs {str(others)[:60]!r}: expected an object, the template's variables by name.",
    )
    variables: dict[str, Any] = _without_null({"tools": tools or None, **others})
    return variables


def _without_null(given: Any) -> Any:
    """Objects without names whose value is null: in Parquet, all have all names."""
    if isinstance(given, Mapping):
        return {name: _without_null(value) for name, value in given.items() if value is not None}
    return [_without_null(value) for value in given] if isinstance(given, list) else given


def _messages_of(fields: Mapping[str, Any], columns: Columns | None, where: str) -> Conversation:
    if columns is not None:
        messages = [{"role": role, "content": _joined(fields, names, where)} for role, names in columns.items()]
        return _checked([message for message in messages if message["content"] or message["role"] not in SYSTEM], where)
    given = {name: value for name, value in fields.items() if value is not None}  # in Parquet, all records have all names
    for name in ("messages", "conversations"):
        if name in given:
            messages = _messages(given[name], name, where)
            system = given.get("system")  # in ShareGPT's records, beside the messages
            lacks = isinstance(system, str) and system and messages and messages[0]["role"] not in SYSTEM
            return _checked([{"role": "system", "content": system}, *messages] if lacks else messages, where)
    if {"prompt", "completion"} <= fields.keys() and {"prompt", "completion"} & given.keys():
        prompt, answer = fields["prompt"], fields["completion"]
        if isinstance(prompt, str) and isinstance(answer, str):
            require(answer.strip() != "", f"{where} has no answer, its completion is empty: fill it in, or leave the record out.")
            return Conversation((prompt, answer))
        asked, answered = _messages(prompt, "prompt", where), _messages(answer, "completion", where)
        return _checked(asked + answered, where)._replace(start=len(asked))
    if "instruction" in fields and "output" in fields:
        require(not fields.get("history"), f"{where} has a history, which no form here has: write all turns as messages.")
        asked_in = ["instruction", *(["input"] if fields.get("input") else [])]
        roles: Columns = {"user": asked_in, "assistant": "output"}
        return _messages_of(fields, {"system": "system", **roles} if "system" in fields else roles, where)
    raise FederationError(f"{where} has {', '.join(fields)}: expected {FORMS}.")


def _joined(fields: Mapping[str, Any], names: list[str] | str, where: str) -> str:
    named = [names] if isinstance(names, str) else names
    lacking = [name for name in named if name not in fields]
    require(not lacking, f"{where} has {', '.join(fields)}, but no {', '.join(lacking)}: check columns.")
    for name in named:
        fits = isinstance(fields[name], str | int | float | None)
        require(fits, f"{where} has the column {name}, which is a {type(fields[name]).__name__}: expected a text.")
    return "\n\n".join(str(fields[name]) for name in named if fields[name] not in (None, ""))


def _messages(given: Any, name: str, where: str) -> list[Message]:
    got = f"{where} has the {name} {str(given)[:60]!r}: expected a list of role and content"
    require(isinstance(given, list), f"{got}{', or two texts' if name in ('prompt', 'completion') else ''}.")
    return [_message(one, where) for one in given]


def _message(given: Any, where: str) -> Message:
    if isinstance(given, Mapping) and "from" in given and "value" in given:
        given = {"role": SHAREGPT.get(str(given["from"]), given["from"]), "content": given["value"]}
    fits = isinstance(given, Mapping) and isinstance(given.get("role"), str)
    if not fits or not isinstance(given.get("content"), str | list | None):
        raise FederationError(f"{where} has the message {str(given)[:60]!r}: expected role and content.")
    return {name: value for name, value in given.items() if value is not None}  # of Parquet, all have all names


def _checked(messages: list[Message], where: str) -> Conversation:
    """Raises :class:`FederationError` unless messages begin with a question, alternate, and end with an answer."""
    roles = [str(message["role"]) for message in messages]
    got = f"{where} has {'the roles ' + ', '.join(roles) if roles else 'no messages'}"
    turns = roles[1:] if roles[:1] and roles[0] in SYSTEM else roles
    require("assistant" in turns and turns[-1] == "assistant", f"{got}: it ends without an answer, which the assistant gives.")
    require(turns[0] == "user", f"{got}: expected the user first, or after a system message.")
    for before, after in pairwise(turns):
        fits = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}.get(before, ())
        require(after in fits, f"{got}: after {before} comes {after}, expected {' or '.join(fits) or 'user, assistant or tool'}.")
    for message in messages:
        if message["role"] != "assistant":
            require("content" in message, f"{where} has a message of the {message['role']} without content: fill it in.")
        else:
            content = message.get("content")
            empty = not (content.strip() if isinstance(content, str) else content) and not message.get("tool_calls")
            require(not empty, f"{where} has no answer, an assistant's message is empty: fill it in, or leave the record out.")
    return Conversation(messages)
