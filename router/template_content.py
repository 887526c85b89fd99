"""Tells which form of message content a chat template expects, as vLLM tells it.

A template that loops over a message's content wants a list of parts; any other wants a text. The
rules are vLLM's (renderers/hf.py), its blind spots included: what counts is what the engine does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from jinja2 import nodes

from router.chat_messages import ContentFormat


class _TupleTarget(Exception):
    """A loop or an assignment unpacks into several names, which vLLM's rules do not follow."""


def content_format(template: nodes.Template) -> ContentFormat:
    """Return the content format of a parsed template."""
    try:
        return "openai" if any(True for _ in _content_loops(template)) else "string"
    except _TupleTarget:
        return "string"


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _TupleTarget
    return target.name


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """True if `node` is the variable (or its `key`), possibly filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getitem):
        constant = isinstance(node.arg, nodes.Const) and node.arg.value == key
        return constant and _is_variable(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _is_variable(node.node, name)


def _aliases(root: nodes.Node, name: str) -> list[str]:
    """Return `name` and every variable assigned from it, directly or through another."""
    found = [name]
    pending = deque(found)
    while pending:
        source = pending.popleft()
        for assignment in root.find_all(nodes.Assign):
            if _reads(assignment.node, source):
                alias = _name(assignment.target)
                if alias not in found:
                    pending.append(alias)
                    found.append(alias)
    return found


def _message_variables(root: nodes.Node) -> list[str]:
    lists = _aliases(root, "messages")
    loops = root.find_all(nodes.For)
    return [_name(x.target) for x in loops if any(_reads(x.iter, name) for name in lists)]


def _content_parameters(root: nodes.Node, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Return the macro's parameters that some call fills with a message's content."""

    def is_content(node: nodes.Node) -> bool:
        return any(_reads(node, name, "content") for name in messages)

    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in root.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        found.update(
            name for name, value in zip(names, call.args, strict=False) if is_content(value)
        )
        found.update(k.key for k in call.kwargs if k.key in names and is_content(k.value))
    return found


def _content_loops(root: nodes.Node) -> Iterator[nodes.For]:
    """Yield the loops over a message's content, or over what a macro was given as such."""
    messages = _message_variables(root)
    parameters: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        filled = _content_parameters(root, macro, messages)
        for loop in macro.find_all(nodes.For):
            before = parameters.setdefault(id(loop), set())
            if filled:
                parameters[id(loop)] = filled
            elif not before:
                parameters[id(loop)] = before
    for loop in root.find_all(nodes.For):
        inside = parameters.get(id(loop))
        iterated = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if (
            any(_reads(loop.iter, name, "content") for name in messages)
            or (inside is not None and iterated in inside)
            or (inside is None and iterated == "content")
        ):
            _name(loop.target)
            yield loop
