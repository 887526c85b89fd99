"""Renders and tokenizes chats with vLLM's own code: runs in vLLM's environment, not in ours.

Reads a JSON list of cases `{"template", "body", "options"}` from standard input, and writes a list
of answers, one a case: `{"ids": [...]}`, or `{"error": "..."}` where vLLM refuses the request. The
request goes through the same classes as in `vllm serve`, without a server and without an engine.

    python render_probe.py MODEL_FOLDER < cases.json
"""

import asyncio
import json
import sys
from typing import Any

from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config


async def answer(model: ModelConfig, renderer: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Returns the prompt's token ids, or why vLLM refuses."""
    options = case.get("options", {})
    online = OnlineRenderer(
        model,
        renderer,
        request_logger=None,
        chat_template=case["template"],
        chat_template_content_format=options.get("content_format", "auto"),
        exclude_tools_when_tool_choice_none=options.get("drop_unchosen_tools", False),
        default_chat_template_kwargs=options.get("template_kwargs"),
        enable_auto_tools=True,
        tool_parser="hermes",
    )
    try:
        request = ChatCompletionRequest.model_validate(case["body"])
        outcome = await online.render_chat(request)
    except Exception as error:  # whatever it is, the server would answer with an error
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    if not isinstance(outcome, tuple):
        return {"error": str(outcome)[:300]}
    return {"ids": outcome[1][0]["prompt_token_ids"]}


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
