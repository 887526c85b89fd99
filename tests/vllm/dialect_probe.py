"""Renders Anthropic's messages and OpenAI's responses with vLLM's own code, in its environment.

Reads a JSON list of cases `{"kind", "template", "body"}` from standard input, and writes a list of
answers, one a case: `{"ids": [...]}`, or `{"error": "..."}` where vLLM refuses the request.

    python dialect_probe.py MODEL_FOLDER < cases.json
"""

import asyncio
import json
import sys
from typing import Any

from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config


def merges_system(online: OnlineRenderer) -> bool:
    """Returns what vLLM finds out at its start; it does not start with some of our templates."""
    try:
        return AnthropicServingMessages._should_merge_inline_system(online)
    except TypeError:
        return True


async def of_messages(online: OnlineRenderer, body: dict[str, Any]) -> Any:
    """Returns what vLLM renders for a message, by its own class without its engine."""
    serving = object.__new__(AnthropicServingMessages)
    serving.online_renderer = online
    serving._disabled_thinking_effort = None
    serving.model_config = online.model_config
    request = AnthropicMessagesRequest.model_validate(body)
    effort = "none"
    if request.thinking is not None and request.thinking.type == "disabled":
        effort = await serving._get_disabled_thinking_effort()
    chat = serving.to_chat_completion_request(
        request,
        merge_inline_system=merges_system(online),
        disabled_thinking_effort=effort,
    )
    return await online.render_chat(chat)


async def answer(model: ModelConfig, renderer: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Returns the prompt's token ids, or why vLLM refuses."""
    online = OnlineRenderer(
        model,
        renderer,
        request_logger=None,
        chat_template=case["template"],
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
    )
    try:
        if case["kind"] == "messages":
            outcome = await of_messages(online, case["body"])
            prompt = outcome[1][0] if isinstance(outcome, tuple) else None
        else:
            request = ResponsesRequest.model_validate(case["body"])
            outcome = await online.render_responses(request)
            prompt = getattr(outcome, "engine_input", None)
    except Exception as error:  # whatever it is, the server would answer with an error
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"error": str(outcome)[:300]} if prompt is None else {"ids": prompt["prompt_token_ids"]}


async def main(folder: str) -> None:
    """Answers every case."""
    model = ModelConfig(model=folder, dtype="float32")
    renderer = renderer_from_config(
        VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu"))
    )
    cases = json.load(sys.stdin)
    answers = [await answer(model, renderer, case) for case in cases]
    sys.stdout.write("\n" + json.dumps(answers) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
