"""Embeddings, reranking and scores from the emulated engine: cheap, and always the same.

They exist so that a router's routes for them can be tried. A text's vector follows from its tokens;
a pair's score is the cosine of two such vectors.

Source: vllm/entrypoints/pooling of vLLM 0.32 (shapes of bodies).
"""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

from controlplane.core.hashing import pack_tokens
from lab.engine_types import digest
from lab.server_api import Api, ApiError, EmbeddingsBody, RerankBody, ScoreBody, decode

_DIMENSIONS = 32


def embeddings(api: Api, body: bytes) -> dict[str, Any]:
    """Answer `POST /v1/embeddings`. Raises ApiError."""
    asked = decode(body, EmbeddingsBody)
    api.check_model(asked.model)
    inputs = asked.input
    if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
        inputs = [inputs]
    texts = [_ids(api, each) for each in inputs]
    return {
        "id": f"embd-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": asked.model or api.names[0],
        "data": [
            {"index": position, "object": "embedding", "embedding": _vector(ids)}
            for position, ids in enumerate(texts)
        ],
        "usage": _usage(sum(map(len, texts))),
    }


def rerank(api: Api, body: bytes) -> dict[str, Any]:
    """Answer `POST /v1/rerank`. Raises ApiError."""
    asked = decode(body, RerankBody)
    api.check_model(asked.model)
    query = _ids(api, asked.query)
    documents = [_ids(api, each) for each in asked.documents]
    scored = [
        {"index": position, "document": {"text": text}, "relevance_score": _similarity(query, ids)}
        for position, (text, ids) in enumerate(zip(asked.documents, documents, strict=True))
    ]
    scored.sort(key=lambda each: -each["relevance_score"])  # type: ignore[operator]
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": asked.model or api.names[0],
        "usage": _usage(len(query) * len(documents) + sum(map(len, documents))),
        "results": scored[: asked.top_n or None],
    }


def score(api: Api, body: bytes) -> dict[str, Any]:
    """Answer `POST /score`. Raises ApiError."""
    asked = decode(body, ScoreBody)
    api.check_model(asked.model)
    left = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
    right = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right):
        raise ApiError(400, "text_1 must have one text, or as many as text_2", param="text_1")
    pairs = [(_ids(api, one), _ids(api, other)) for one, other in zip(left, right, strict=True)]
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": asked.model or api.names[0],
        "data": [
            {"index": position, "object": "score", "score": _similarity(*pair)}
            for position, pair in enumerate(pairs)
        ],
        "usage": _usage(sum(len(one) + len(other) for one, other in pairs)),
    }


def _ids(api: Api, text: Any) -> list[int]:
    if isinstance(text, str):
        return api.model.encode(text)
    size = api.model.vocabulary_size
    if isinstance(text, list) and all(isinstance(each, int) and 0 <= each < size for each in text):
        return text
    problem = f"inputs must be texts or lists of token ids from 0 to {size - 1}"
    raise ApiError(400, problem, param="input")


def _vector(ids: list[int]) -> list[float]:
    """Return a unit vector that depends on the tokens alone."""
    packed = pack_tokens(ids)
    raw = [digest(packed + bytes([axis])) / 2**63 - 1.0 for axis in range(_DIMENSIONS)]
    length = math.sqrt(sum(each * each for each in raw))
    return [round(each / length, 6) for each in raw]


def _similarity(one: list[int], other: list[int]) -> float:
    """Return the cosine of two texts' vectors, moved to 0 … 1."""
    products = (a * b for a, b in zip(_vector(one), _vector(other), strict=True))
    return round((1.0 + sum(products)) / 2, 6)


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
