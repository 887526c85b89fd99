"""The API surface: which paths there are, and what routing reads from their bodies."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.plane import Plane
from router.directory import ServedModel
from router.prefix_cache import PrefixCache
from router.prompt import Inexact, Prompt, Reason
from router.reading import Rest, read
from router.surface import ENDPOINTS, MEDIA_TOKENS, PASS_THROUGH, Asked, estimate_tokens, read_body
from router.template_habits import habits_of
from router.tokens import PromptReader, ReadLimits
from schemas.codec import RemoteError
from tests.router.dialect_samples import messages_body, responses_body
from tests.router.service_rig import tiny_card
from tests.router.test_messages_chat import JUNK, places_in

CHAT = b"/v1/chat/completions"
TEXT = "one two three four five six seven eight nine ten " * 4
ASKED = [{"role": "user", "content": TEXT}]


def served(limits: ReadLimits | None = None) -> ServedModel:
    """Return the tiny model as a router serves it."""
    card = tiny_card()
    model = ServedModel("tiny", Plane("tiny", "r", 1))
    more = {} if limits is None else {"limits": limits}
    reader = PromptReader(card, PrefixCache(), ThreadPoolExecutor(1), **more)
    model.use("digest", card, reader, habits_of(card))
    return model


TINY = served()


def found(path: bytes, model: ServedModel = TINY, **body: Any) -> Any:
    """Return what is read at a path."""
    parsed, _ = read_body(ENDPOINTS[path], json.dumps({"model": "tiny", **body}).encode())
    return read(model, Asked(parsed, 0), None)


def blocks(path: bytes, **body: Any) -> tuple[int, list[int]]:
    """Return the length and the block hashes of a prompt, which must be known."""
    prompt = found(path, **body)
    assert isinstance(prompt, Prompt), prompt
    assert prompt.hashes
    return prompt.tokens, prompt.hashes


def test_the_same_chat_is_the_same_prompt_in_every_form() -> None:
    """Chat, message, response and embedding of a chat lead to the same blocks."""
    chat = blocks(CHAT, messages=ASKED)
    assert blocks(b"/v1/messages", messages=ASKED, max_tokens=5) == chat
    assert blocks(b"/v1/responses", input=ASKED) == chat
    embedding = {"add_generation_prompt": True}
    assert blocks(b"/v1/embeddings", messages=ASKED, **embedding) == chat
    assert blocks(b"/v1/embeddings", input=ASKED, **embedding) == chat


def test_texts_and_token_ids_are_read_as_completions() -> None:
    """Embeddings and generations of one text are exact; so are token ids."""
    text = blocks(b"/v1/completions", prompt=TEXT)
    assert blocks(b"/v1/embeddings", input=TEXT) == text
    assert blocks(b"/v1/embeddings", input=[TEXT]) == text
    ids = list(range(40))
    completion = blocks(b"/v1/completions", prompt=ids)
    assert blocks(b"/v1/embeddings", input=ids) == completion
    assert blocks(b"/inference/v1/generate", token_ids=ids, sampling_params={}) == completion


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (b"/v1/completions", {"prompt": "a", "suffix": "b"}, Reason.UNSUPPORTED),
        (
            b"/v1/completions",
            {"prompt": "a", "kv_transfer_params": {"prompt_token_ids": [1]}},
            Reason.UNSUPPORTED,
        ),
        (
            CHAT,
            {"messages": ASKED, "kv_transfer_params": {"prompt_token_ids": [1]}},
            Reason.UNSUPPORTED,
        ),
        (b"/v1/embeddings", {"input": ["a", "b"]}, Reason.BATCH),
        (b"/v1/embeddings", {"messages": [ASKED, ASKED]}, Reason.BATCH),
        (b"/v1/embeddings", {"input": "a", "padding": "max_length"}, Reason.TRUNCATION),
        (b"/v1/embeddings", {}, Reason.INVALID),
        (b"/inference/v1/generate", {"token_ids": [1], "features": {}}, Reason.MULTIMODAL),
        (b"/score", {"text_1": "a", "text_2": "b"}, Reason.UNSUPPORTED),
        (b"/v1/rerank", {"query": "a", "documents": ["b"]}, Reason.UNSUPPORTED),
        (b"/tokenize", {"prompt": "a"}, Reason.UNSUPPORTED),
    ],
)
def test_what_is_not_known_exactly_says_why(
    path: bytes, body: dict[str, Any], reason: Reason
) -> None:
    """These are routed by load."""
    outcome = found(path, **body)
    assert isinstance(outcome, Inexact)
    assert outcome.reason is reason


def test_ordinary_transfer_parameters_change_nothing() -> None:
    """Only forwarded token ids replace the prompt."""
    plain = blocks(CHAT, messages=ASKED)
    assert blocks(CHAT, messages=ASKED, kv_transfer_params={"do_remote_decode": True}) == plain


def test_a_model_without_a_reader_is_routed_by_load() -> None:
    """Until its card has come."""
    bare = ServedModel("tiny", Plane("tiny", "r", 1))
    assert found(CHAT, bare, messages=ASKED) == Inexact(Reason.NO_TOKENIZER)


def test_the_model_is_found_in_any_body() -> None:
    """JSON, forms, and bodies that are neither."""
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
        b"Content-Type: audio/wav\r\n\r\n\x00\xff\r\n--x\r\n"
        b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
    )
    multipart = b"multipart/form-data; boundary=x"
    assert read_body(PASS_THROUGH, form, multipart) == (None, "whisper")
    assert read_body(PASS_THROUGH, form) == (None, "")
    large = form.replace(b"\x00\xff", b"\x00\xff" * 1_000_000)
    assert read_body(PASS_THROUGH, large, multipart) == (None, "whisper")
    late = large.replace(b"--x--", b"--x\r\n\r\n" + b"z" * 100_000)
    assert read_body(PASS_THROUGH, late, multipart) == (None, "")
    named = b'--x\r\ncontent-disposition: form-data; filename="model"\r\n\r\nno\r\n' + form
    assert read_body(PASS_THROUGH, bytearray(named), multipart) == (None, "whisper")


@pytest.mark.parametrize(
    "piece",
    [
        b'content-disposition: name="model" ',
        b'content-disposition: name="model"\r\n',
        b"content-disposition: ",
        b' name="model"',
        b"\r\n",
    ],
)
def test_a_form_that_was_made_to_be_slow_is_not(piece: bytes) -> None:
    """Whatever is repeated in it, a form is looked through in a few steps."""
    body = (b"content-disposition:" + piece * 65_536)[:65_536]
    start_s = time.monotonic()
    assert read_body(PASS_THROUGH, body, b"multipart/form-data; boundary=x") == (None, "")
    assert time.monotonic() - start_s < 1.0
    assert read_body(PASS_THROUGH, b'{"model":"m","x":1}') == (None, "m")
    for body in (b"", b"\xff", b"[1]", b'{"model":null}', b'{"model":7}'):
        assert read_body(PASS_THROUGH, body) == (None, "")


def test_fields_of_other_types_leave_the_model_readable() -> None:
    """The engine judges them; routing needs only the name."""
    body = b'{"model":"m","messages":"nonsense","max_tokens":"7"}'
    assert read_body(ENDPOINTS[CHAT], body) == (None, "m")
    assert read_body(ENDPOINTS[CHAT], b'{"model":null,"messages":[]}') == (None, "")
    with pytest.raises(RemoteError):
        read_body(ENDPOINTS[CHAT], b"[]")


def test_estimates_count_text_and_media_not_base64() -> None:
    """A megabyte of image is no quarter of a million tokens; what computes nothing costs 1."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    parts = [{"type": "text", "text": "x" * 400}, image]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    endpoint = ENDPOINTS[CHAT]
    parsed, _ = read_body(endpoint, body)
    assert estimate_tokens(endpoint, parsed, len(body)) == 100 + MEDIA_TOKENS
    assert estimate_tokens(PASS_THROUGH, None, 4000) == 1000
    assert estimate_tokens(ENDPOINTS[b"/tokenize"], None, 4000) == 1
    assert estimate_tokens(PASS_THROUGH, None, 0) == 1


@given(
    path=st.sampled_from([b"/v1/messages", b"/v1/responses"]),
    seed=st.integers(0, 10_000),
    where=st.integers(0, 10_000),
    junk=st.sampled_from(JUNK),
)
@settings(max_examples=200)
def test_odd_bodies_never_break_the_reader(path: bytes, seed: int, where: int, junk: Any) -> None:
    """Read to the end, there is a prompt or a reason, whatever stands in a field."""
    make = messages_body if path == b"/v1/messages" else responses_body
    body = make(random.Random(seed))
    places = [(owner, key) for owner, key in places_in(body) if key != "model"]
    owner, key = places[where % len(places)]
    owner[key] = junk
    parsed, _ = read_body(ENDPOINTS[path], json.dumps(body).encode())
    assert isinstance(read(TINY, Asked(parsed, 0), None), Prompt | Inexact)


class TestWhatTakesLonger:
    """A long new text is tokenized elsewhere; what began must end, one way or another."""

    def _reading(self, model: ServedModel) -> Rest:
        model_text = "one two three " * 3000
        begun = found(CHAT, model, messages=[{"role": "user", "content": model_text}])
        assert isinstance(begun, Rest)
        return begun

    def _handles(self, model: ServedModel) -> int:
        assert model.reader is not None
        return model.reader._cache.stats.handles

    async def test_awaited_it_gives_the_prompt(self) -> None:
        """The rest of the coroutine runs to its end."""
        model = served(ReadLimits(chars_now_max=100))
        assert isinstance(await self._reading(model), Prompt)
        assert self._handles(model) == 0

    async def test_closed_it_gives_everything_back(self) -> None:
        """A client that left before its turn pins nothing in the prefix cache."""
        model = served(ReadLimits(chars_now_max=100))
        rest = self._reading(model)
        assert self._handles(model) == 1
        rest.close()
        assert self._handles(model) == 0
        rest.close()

    async def test_forgotten_it_gives_everything_back(self) -> None:
        """Even if nobody closes it."""
        model = served(ReadLimits(chars_now_max=100))
        rest = self._reading(model)
        del rest
        gc.collect()
        assert self._handles(model) == 0

    async def test_cancelled_it_gives_everything_back(self) -> None:
        """While it is awaited."""
        model = served(ReadLimits(chars_now_max=100))
        rest = self._reading(model)

        async def wait() -> None:
            await rest

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert self._handles(model) == 0
