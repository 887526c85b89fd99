"""Chats are rendered as the engine renders them, or not at all.

`tests/vllm/test_rendering.py` compares the same code with vLLM itself; here each rule is by itself.
"""

from datetime import datetime
from typing import Any

import jinja2
import pytest

from router.chat_messages import normalise_messages, normalise_tools
from router.chat_template import ChatTemplate, RenderOptions, TemplateSyntaxError
from router.prompt import Inexact, Reason
from schemas.openai import ChatRequest
from tests.router.chat_samples import TEMPLATES

USER = {"role": "user", "content": "hi"}


def noon() -> datetime:
    """Returns a fixed time."""
    return datetime(2026, 3, 4, 12, 30)


def render(source: str, /, options: RenderOptions = RenderOptions(), **fields: Any) -> Any:  # noqa: B008
    """Renders one request with a template."""
    request = ChatRequest(**{"messages": [USER], **fields})
    return ChatTemplate(source, {"bos_token": "<s>"}, options, noon).render(request)


def reason(outcome: Any) -> Reason:
    """Returns why an outcome is inexact."""
    assert isinstance(outcome, Inexact), outcome
    return outcome.reason


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("a{% generation %}b{{ bos_token }}{% endgeneration %}c", "ab<s>c"),
        ("{{ strftime_now('%d %b %Y %%H %-d') }}", "04 Mar 2026 %H 4"),
        ("{{ unknown }}{{ eos_token }}{{ documents }}{{ tools }}", "NoneNone"),
        ("{{ messages[0].keys() | list }}{{ messages[0].missing }}", "['role', 'content']"),
        ("{{ messages[0].content.upper() }}{{ messages[0]['role'] }}", "HIuser"),
    ],
)
def test_the_environment_is_that_of_transformers(source: str, text: str) -> None:
    """Blocks, filters, functions and undefined names behave as in apply_chat_template."""
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('no') }}", Reason.TEMPLATE_ERROR),
        ("{{ messages[7].content.strip() }}", Reason.TEMPLATE_ERROR),
        ("{{ 1 + 'a' }}", Reason.TEMPLATE_ERROR),
        ("{{ 1 / 0 }}", Reason.TEMPLATE_ERROR),
        ("{{ messages.append(1) }}", Reason.TEMPLATE_ERROR),
        ("{{ messages.__class__.__mro__ }}", Reason.TEMPLATE_ERROR),
        ("{{ range(999999999) }}", Reason.TEMPLATE_ERROR),
        ("{{ strftime_now('%H:%M') }}", Reason.CLOCK),
        ("{{ strftime_now('%c') }}", Reason.CLOCK),
        ("{{ strftime_now('%-I') }}", Reason.CLOCK),
    ],
)
def test_what_a_template_refuses_is_inexact(source: str, why: Reason) -> None:
    """An error in the template, a breach of the sandbox and the time of day have no answer."""
    assert reason(render(source)) == why


def test_a_template_that_does_not_compile_says_so() -> None:
    """A broken template is found when the model's card arrives, not at the first request."""
    with pytest.raises(TemplateSyntaxError, match="does not compile"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"chat_template": "x"}, Reason.REQUEST_TEMPLATE),
        ({"chat_template_kwargs": {"chat_template": "x"}}, Reason.REQUEST_TEMPLATE),
        ({"chat_template_kwargs": {"tokenize": True}}, Reason.UNSUPPORTED),
        ({"chat_template_kwargs": {"tools": []}}, Reason.UNSUPPORTED),
        ({"continue_final_message": True}, Reason.INVALID),
        ({"tools": []}, Reason.INVALID),
        ({"messages": []}, Reason.INVALID),
    ],
)
def test_requests_that_mean_something_else_are_inexact(fields: dict[str, Any], why: Reason) -> None:
    """Fields that change more than the template's variables are not followed."""
    assert reason(render("{{ messages[0].content }}", **fields)) == why


SHOW = "{{ enable_thinking }},{{ reasoning_effort }},{{ add_generation_prompt }},{{ documents }}"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ",,True,None"),
        ({"add_generation_prompt": False}, ",,False,None"),
        ({"documents": []}, ",,True,[]"),
        ({"reasoning_effort": "none"}, "False,none,True,None"),
        ({"reasoning_effort": "low"}, "True,low,True,None"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "False,low,True,None",
        ),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, ",,True,None"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, ",,True,None"),
    ],
)
def test_arguments_are_merged_as_in_vllm(fields: dict[str, Any], text: str) -> None:
    """A request's own fields come before its template arguments; None is not given."""
    assert render(SHOW, **fields) == text


def test_the_servers_arguments_come_last() -> None:
    """`--default-chat-template-kwargs` holds where a request says nothing or None or auto."""
    options = RenderOptions(template_kwargs={"enable_thinking": "server", "bos_token": "[B]"})
    given = {"chat_template_kwargs": {"enable_thinking": "auto"}}
    assert render("{{ enable_thinking }}{{ bos_token }}", options, **given) == "server[B]"
    given = {"chat_template_kwargs": {"enable_thinking": "client"}}
    assert render("{{ enable_thinking }}", options, **given) == "client"


def test_tools_can_be_left_out_when_none_may_be_chosen() -> None:
    """As `--exclude-tools-when-tool-choice-none` says."""
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    assert render("{{ tools }}", RenderOptions(drop_unchosen_tools=True), **fields) == "None"
    assert "f" in render("{{ tools }}", **fields)


FINAL = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (FINAL, "so far", "[user]hi[/][assistant]so far"),
        (FINAL, "so far  ", "[user]hi[/][assistant]so far"),
        (FINAL.replace(" | trim", ""), "so far  ", "[user]hi[/][assistant]so far  "),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}.{% endfor %}{% endfor %}",
         [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "hi.a.b"),
    ],
)  # fmt: skip
def test_a_final_message_is_continued(source: str, content: Any, text: str) -> None:
    """The rendered chat ends with the final message, and the request's messages stay unchanged."""
    messages = [USER, {"role": "assistant", "content": content}]
    before = repr(messages)
    resume = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(source, messages=messages, **resume) == text
    assert repr(messages) == before


@pytest.mark.parametrize(
    ("source", "messages", "why"),
    [
        ("{{ messages[0].content }}", [USER, {**USER, "content": "lost"}], Reason.TEMPLATE_ERROR),
        ("{{ messages[0] }}", [USER], Reason.INVALID),
        ("{% for p in messages[0].content %}{% endfor %}", [{**USER, "content": []}],
         Reason.TEMPLATE_ERROR),
        ("{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
         [{**USER, "content": []}], Reason.INVALID),
    ],
)  # fmt: skip
def test_a_final_message_that_cannot_be_continued(
    source: str, messages: list[dict[str, Any]], why: Reason
) -> None:
    """A template that drops or never shows the final text has no continuation."""
    resume = {"continue_final_message": True, "add_generation_prompt": False}
    assert reason(render(source, messages=messages, **resume)) == why


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen", "string"), ("llama", "string"), ("parts", "openai"), ("macro", "openai")],
)
def test_the_content_format_is_detected(name: str, form: str) -> None:
    """A template that loops over content, itself or in a macro, is given parts."""
    assert ChatTemplate(TEMPLATES[name], {}).content_format == form


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
         "openai"),
        ("{% for m in messages[1:] %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% set x = messages %}{% set y = x[1:] %}{% for m in y %}{% for p in m.content %}"
         "{% endfor %}{% endfor %}", "openai"),
        ("{% for p in content %}{% endfor %}", "openai"),
        ("{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}", "string"),
        ("{% macro f(a, b) %}{% for p in b %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ f(1, b=m.content) }}{% endfor %}", "openai"),
        ("{% macro f(a, b) %}{% for p in b %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ f(m.content, 1) }}{% endfor %}", "string"),
        ("{% for a, b in messages %}{% for p in a.content %}{% endfor %}{% endfor %}", "string"),
        ("{% set a, b = messages %}{% for p in content %}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m.parts %}{% endfor %}{% endfor %}", "string"),
    ],
)  # fmt: skip
def test_detection_has_vllms_rules(source: str, form: str) -> None:
    """Aliases, slices, filters and macro arguments are followed as far as vLLM follows them."""
    assert ChatTemplate(source, {}).content_format == form


def test_the_content_format_can_be_set() -> None:
    """`--chat-template-content-format` overrides what is detected."""
    options = RenderOptions(content_format="openai")
    assert (
        render("{{ messages[0].content | tojson }}", options) == '[{"type": "text", "text": "hi"}]'
    )


def only(message: dict[str, Any], form: Any = "string") -> dict[str, Any]:
    """Returns one message normalised."""
    out = normalise_messages([message], form)
    assert not isinstance(out, Inexact), out
    return out[0]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]}, "a\nb"),
        ({"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "b"}]},
         "b"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "closed": True},
                                           {"type": "refusal", "refusal": "b"}]}, "a\nb"),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "user"}, ""),
        ({"role": "system", "content": "x-anthropic-billing-header: 1\nrest"}, "rest"),
        ({"role": "system", "content": "x-anthropic-billing-header: 1"}, ""),
        ({"role": "user", "content": "x-anthropic-billing-header: 1"},
         "x-anthropic-billing-header: 1"),
    ],
)  # fmt: skip
def test_content_becomes_a_text(message: dict[str, Any], content: str) -> None:
    """Parts are joined with new lines, empty ones dropped, and a changing header with them."""
    assert only(message)["content"] == content


def test_parts_keep_what_templates_may_ask_for() -> None:
    """Keys that vLLM does not know stay beside a part's type and text."""
    part = {"cache_control": {"type": "ephemeral"}, "type": "text", "text": "a", "name": "n"}
    out = only({"role": "user", "content": [part]}, "openai")
    assert list(out["content"][0].items()) == [
        ("type", "text"),
        ("text", "a"),
        ("cache_control", {"type": "ephemeral"}),
    ]


def test_tool_results_are_always_a_text() -> None:
    """A tool's parts are joined even for templates that want parts, empty ones too."""
    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    message = {"role": "tool", "content": parts, "tool_call_id": "1"}
    assert only(message, "openai") == {"role": "tool", "content": "a\n\nb", "tool_call_id": "1"}


def call(arguments: Any) -> dict[str, Any]:
    """Returns an assistant's message with one tool call."""
    function = {"name": "f", "arguments": arguments, "more": 1}
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "index": 0, "function": function, "id": "1"}],
    }


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"b": 1, "a": 2}', {"b": 1, "a": 2}), ("", {}), ("[1]", {}), ("no json", {}), ("null", {})],
)
def test_arguments_of_calls_become_objects(arguments: str, parsed: dict[str, Any]) -> None:
    """Templates get a mapping, an empty one for anything else, and keys in vLLM's order."""
    (out,) = only(call(arguments))["tool_calls"]
    assert out["function"]["arguments"] == parsed
    assert list(out) == ["id", "function", "type", "index"]
    assert list(out["function"]) == ["arguments", "name", "more"]


def test_reasoning_has_two_names() -> None:
    """Either field of a request fills both of a template's; `reasoning` comes first."""
    both = {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "old"}
    for message in (both, {**both, "reasoning": None, "reasoning_content": "r"}):
        out = only(message)
        assert out["reasoning"] == out["reasoning_content"] == "r"
    assert "reasoning" not in only({"role": "user", "content": "x", "reasoning": "r"})


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "x"}, Reason.INVALID),
        (["user", "x"], Reason.INVALID),
        ({"role": 5, "content": "x"}, Reason.INVALID),
        ({"role": "user", "content": None}, Reason.INVALID),
        ({"role": "user", "content": 5}, Reason.INVALID),
        ({"role": "user", "content": ["x"]}, Reason.INVALID),
        ({"role": "user", "content": [{"type": "text"}]}, Reason.INVALID),
        ({"role": "user", "content": [{"type": "text", "text": "a", "uuid": "u"}]}, Reason.INVALID),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
         Reason.MULTIMODAL),
        ({"role": "user", "content": [{"image_url": "u"}]}, Reason.MULTIMODAL),
        ({"role": "user", "content": [{"type": "input_audio"}]}, Reason.MULTIMODAL),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, Reason.INVALID),
        ({"role": "user", "content": [{"type": {}, "text": "a"}]}, Reason.INVALID),
        (call("[" * 100_000), Reason.INVALID),
        ({"role": "assistant", "content": "x", "tool_calls": 5}, Reason.INVALID),
        ({"role": "assistant", "content": "x", "tool_calls": [5]}, Reason.INVALID),
        ({"role": "assistant", "content": "x", "tool_calls": [{"type": "custom"}]}, Reason.INVALID),
        (call({"a": 1}), Reason.INVALID),
        ({"role": "assistant", "content": "x", "reasoning": 5}, Reason.UNSUPPORTED),
        ({"role": "developer", "content": "x", "tools": []}, Reason.UNSUPPORTED),
    ],
)  # fmt: skip
def test_messages_that_are_not_followed(message: Any, why: Reason) -> None:
    """Whatever is no plain text has a reason, and never a wrong rendering."""
    assert reason(normalise_messages([message], "string")) == why


def test_tools_are_shown_as_vllms_models_print_them() -> None:
    """Known keys in order, None where a description or parameters are missing, others dropped."""
    tools = [
        {"function": {"more": 1, "strict": True, "description": "d", "name": "f"}, "other": 2},
        {"type": "function", "function": {"name": "g", "strict": None}},
    ]
    assert repr(normalise_tools(tools)) == repr(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": None, "strict": True},
            },
            {
                "type": "function",
                "function": {"name": "g", "description": None, "parameters": None},
            },
        ]
    )


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ({}, Reason.INVALID),
        ({"type": "custom", "function": {"name": "f"}}, Reason.INVALID),
        ({"function": {}}, Reason.INVALID),
        ({"function": {"name": "f", "parameters": []}}, Reason.INVALID),
        ({"function": {"name": "f", "strict": "yes"}}, Reason.INVALID),
        ({"function": {"name": "f"}, "defer_loading": True}, Reason.UNSUPPORTED),
    ],
)
def test_tools_that_are_not_followed(tool: dict[str, Any], why: Reason) -> None:
    """A tool that vLLM refuses, or shows in a way of its own, is inexact."""
    assert reason(normalise_tools([tool])) == why


ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def test_developers_become_the_system() -> None:
    """For a template that knows no developer, all system and developer texts come first as one."""
    messages = [
        {"role": "system", "content": "one"},
        USER,
        {"role": "developer", "content": "two"},
        {"role": "developer", "content": ""},
    ]
    assert render(ROLES, messages=messages) == "system:one\n\ntwo;user:hi;"
    assert render(ROLES + "{# 'developer' #}", messages=messages).startswith("system:one;user")


def test_a_leading_developer_is_renamed_only() -> None:
    """One developer at the beginning keeps its place and its form."""
    messages = [{"role": "developer", "content": ""}, USER]
    assert render(ROLES, messages=messages) == "system:;user:hi;"


def test_two_systems_without_a_developer_stay() -> None:
    """Only a developer's message makes vLLM gather the systems."""
    messages = [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}]
    assert render(ROLES, messages=messages) == "system:a;user:hi;system:b;"


def test_the_sandbox_shortcut_is_the_sandbox() -> None:
    """For dicts the quick way answers as Jinja's own does, attributes before keys."""
    source = "{{ d.items is callable }}{{ d.x }}{{ d.nope is defined }}{{ d.a.b }}{{ d.get('x') }}"
    value = {"items": 1, "x": 2, "a": {"b": 3}}
    ours = ChatTemplate("", {})._template.environment.from_string(source)
    theirs = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source)
    assert ours.render(d=value) == theirs.render(d=value) == "True2False32"
