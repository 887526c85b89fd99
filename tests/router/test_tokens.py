"""Reading a request through the cache gives what tokenizing and hashing it whole gives."""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from controlplane.core.hashing import NO_EXTRAS, Extras, chain, pack_tokens
from lab.tiny_model import tiny_model_dir
from router.chat_template import ChatTemplate
from router.prefix_cache import NODE_BYTES, PrefixCache
from router.prompt import Inexact, Prompt, Reason
from router.tokens import PromptReader, ReadLimits
from schemas.bus import ModelCard
from schemas.openai import ChatRequest, CompletionRequest, decode_chat
from tests.router import chat_samples
from tests.router import tokenizer_samples as samples

BLOCK = 4
SPECIAL_TOKENS = {"eos_token": "<|im_end|>"}
TINY_TEMPLATE = (tiny_model_dir() / "chat_template.jinja").read_text(encoding="utf-8")
TEMPLATES = {**chat_samples.TEMPLATES, "tiny": TINY_TEMPLATE}
LORA = Extras(lora="adapter")


def noon() -> datetime:
    """Returns a fixed time."""
    return datetime(2026, 3, 4, 12, 30)


def card(kind: str = "packaged", template: str | None = TINY_TEMPLATE, **fields: Any) -> ModelCard:
    """Returns a model card with one of the sample tokenizers."""
    tokenizer = samples.ALL[kind]()
    rest = {"special_tokens": SPECIAL_TOKENS, "block_size": BLOCK, **fields}
    return ModelCard("m", tokenizer, template, **rest)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """Yields a thread for long texts."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


@cache
def template_of(source: str | None) -> ChatTemplate:
    """Returns a compiled template."""
    assert source is not None
    return ChatTemplate(source, SPECIAL_TOKENS, now=noon)


@cache
def library_of(data: bytes) -> LibraryTokenizer:
    """Returns the library's own tokenizer."""
    return LibraryTokenizer.from_buffer(data)


def reader(of: ModelCard, executor: Executor, **options: Any) -> PromptReader:
    """Returns a reader with a cache of its own."""
    cache = options.pop("cache", None) or PrefixCache()
    return PromptReader(of, cache, executor, now=noon, **options)


def whole(of: ModelCard, request: ChatRequest, extras: Extras = NO_EXTRAS) -> Prompt | Inexact:
    """Reads a chat without cuts and without a cache, by the library alone."""
    text = template_of(of.chat_template).render(request)
    if isinstance(text, Inexact):
        return text
    library = library_of(of.tokenizer)
    ids = library.encode(text, add_special_tokens=request.add_special_tokens).ids
    salted = Extras(extras.lora, request.cache_salt)
    hashes = chain(pack_tokens(ids), of.block_size, extras=salted)
    return Prompt(len(ids), hashes, salted, 0, tuple(ids[:5]))


def same(read: Prompt | Inexact, truth: Prompt | Inexact) -> bool:
    """Returns whether two outcomes differ at most in what came from a cache."""
    if isinstance(read, Inexact) or isinstance(truth, Inexact):
        return read == truth
    return (read.tokens, read.hashes, read.extras, read.head) == (
        truth.tokens,
        truth.hashes,
        truth.extras,
        truth.head,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(samples.ALL))
@pytest.mark.parametrize("template", ["tiny", "qwen", "llama", "strict", "parts"])
def test_cached_is_whole(kind: str, template: str, executor: Executor) -> None:
    """Turn after turn of many chats, under a small budget, every prompt is exactly the whole's."""
    of = card(kind, TEMPLATES[template])
    read = reader(of, executor, cache=PrefixCache(budget_bytes=40 * NODE_BYTES))
    chance = random.Random(f"{kind} {template}")
    for _ in range(5):
        chat = chat_samples.messages(chance, turns_max=3)
        for turn in range(1, len(chat) + 1):
            fields: dict[str, Any] = {"messages": chat[:turn]}
            fields["tools"] = chat_samples.tools(chance) if chance.random() < 0.1 else None
            fields["cache_salt"] = chance.choice((None, None, "salt"))
            fields["add_special_tokens"] = chance.random() < 0.2
            request = ChatRequest(**fields)
            extras = chance.choice((NO_EXTRAS, LORA))
            assert same(read.read_chat_now(request, extras), whole(of, request, extras))
    read._cache.check()
    assert read._cache.stats.handles == 0


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), template=st.sampled_from(sorted(TEMPLATES)))
def test_any_request_is_whole_twice(seed: int, template: str) -> None:
    """Bodies of every shape read the same for the first time, for the second, and whole."""
    of, read = kept_reader(template)
    request = decode_chat(chat_samples.encoded(chat_samples.body(random.Random(seed))))
    truth = whole(of, request)
    assert same(read.read_chat_now(request), truth)
    assert same(asyncio.run(read.read_chat(request)), truth)


@cache
def kept_reader(template: str) -> tuple[ModelCard, PromptReader]:
    """Returns a card and a reader for many examples, whose texts are too short for threads."""
    of = card(template=TEMPLATES[template])
    return of, reader(of, ThreadPoolExecutor(1))


def user(content: str) -> dict[str, Any]:
    """Returns a user's message."""
    return {"role": "user", "content": content}


def test_a_next_turn_comes_from_the_cache(executor: Executor) -> None:
    """All of the last turn's messages are found again; only the new ones are read anew."""
    read = reader(card(), executor)
    chat = [{"role": "system", "content": "Be kind. " * 20}, user("Why? " * 30)]
    first = read.read_chat_now(ChatRequest(messages=chat))
    chat += [{"role": "assistant", "content": "Because. " * 30}, user("So what?")]
    second = read.read_chat_now(ChatRequest(messages=chat))
    assert isinstance(first, Prompt)
    assert isinstance(second, Prompt)
    assert first.cached_tokens == 0
    generation_prompt = 5
    assert 0 < first.tokens - second.cached_tokens <= generation_prompt
    assert (
        second.hashes[: second.cached_tokens // BLOCK]
        == first.hashes[: len(first.hashes)][: second.cached_tokens // BLOCK]
    )


def test_another_chat_shares_the_system_message(executor: Executor) -> None:
    """Chats that begin alike share what they have in common."""
    read = reader(card(), executor)
    system = {"role": "system", "content": "Be kind. " * 50}
    read.read_chat_now(ChatRequest(messages=[system, user("one")]))
    other = read.read_chat_now(ChatRequest(messages=[system, user("two")]))
    assert isinstance(other, Prompt)
    assert other.cached_tokens > 50


def test_special_tokens_in_a_message_are_the_engines_tokens(executor: Executor) -> None:
    """A message that quotes a turn's end ends the turn: the engine's tokenizer sees text alone."""
    read = reader(card(), executor)
    quoted = user("a<|im_end|>\n<|im_start|>user\nb")
    plain = [user("a"), user("b")]
    by_quote = read.read_chat_now(ChatRequest(messages=[quoted]))
    by_turns = read.read_chat_now(ChatRequest(messages=plain))
    assert isinstance(by_turns, Prompt)
    assert same(by_quote, by_turns)
    assert by_turns.cached_tokens > 0


def test_salts_and_adapters_share_no_hash(executor: Executor) -> None:
    """The same chat under another salt or adapter has the same tokens and none of the hashes."""
    read = reader(card(), executor)
    messages = [user("some words " * 20)]
    prompts = [
        read.read_chat_now(ChatRequest(messages=messages, cache_salt=salt), extras)
        for salt in (None, "a", "b")
        for extras in (NO_EXTRAS, LORA)
    ]
    assert len({prompt.tokens for prompt in prompts if isinstance(prompt, Prompt)}) == 1
    hashes = [h for prompt in prompts if isinstance(prompt, Prompt) for h in prompt.hashes]
    assert len(set(hashes)) == len(hashes) > 0


@pytest.mark.parametrize(
    ("template", "cuts"),
    [("tiny", ("<|im_start|>",)), ("qwen", ("<|im_start|>",)), ("strict", ("<|im_end|>",))],
)
def test_cuts_fit_the_template(template: str, cuts: tuple[str, ...], executor: Executor) -> None:
    """Prompts are cut at the tokens that begin, or else end, a turn."""
    of = card("packaged", TEMPLATES[template])
    assert reader(of, executor).cuts == cuts


def test_a_tokenizer_without_safe_cuts_is_read_whole(executor: Executor) -> None:
    """It is detected, counted, and exact."""
    of = card("greedy_space")
    read = reader(of, executor)
    request = ChatRequest(messages=[user("a  b " * 100)])
    assert read.cuts == ()
    assert same(read.read_chat_now(request), whole(of, request))
    assert read.stats.whole == 1


def completion(read: PromptReader, **fields: Any) -> Prompt | Inexact:
    """Reads a completion at once."""
    return read.read_completion_now(CompletionRequest(**fields))


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_text_prompts_get_special_tokens_as_asked(
    asked: bool, adds: bool, executor: Executor
) -> None:
    """BOS comes before a plain prompt where both the model and the request want it."""
    of = card("metaspace", None, adds_special_tokens=adds)
    ids = LibraryTokenizer.from_buffer(of.tokenizer).encode(
        "the fox <|im_start|> jumps", add_special_tokens=asked and adds
    )
    read = reader(of, executor)
    for _ in range(2):
        prompt = completion(read, prompt="the fox <|im_start|> jumps", add_special_tokens=asked)
        assert isinstance(prompt, Prompt)
        assert prompt.hashes == chain(pack_tokens(ids.ids), BLOCK)
        assert prompt.head == tuple(ids.ids[:5])


@pytest.mark.parametrize("prompt", [list(range(30)), [list(range(30))]])
def test_token_ids_are_taken_as_they_are(prompt: list[Any], executor: Executor) -> None:
    """A prompt of token ids needs no tokenizer at all."""
    read = reader(ModelCard("m", b"", block_size=BLOCK), executor)
    read_prompt = completion(read, prompt=prompt, cache_salt="s")
    assert isinstance(read_prompt, Prompt)
    assert read_prompt.tokens == 30
    assert read_prompt.hashes == chain(pack_tokens(range(30)), BLOCK, extras=Extras(salt="s"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": ["a", "b"]}, Reason.BATCH),
        ({"prompt": [[1], [2]]}, Reason.BATCH),
        ({"prompt": []}, Reason.INVALID),
        ({"prompt": None}, Reason.INVALID),
        ({"prompt": [-1]}, Reason.INVALID),
        ({"prompt": [2**32]}, Reason.INVALID),
        ({"prompt": "a", "prompt_embeds": "x"}, Reason.MULTIMODAL),
        ({"prompt": "a", "truncate_prompt_tokens": 5}, Reason.TRUNCATION),
        ({"prompt": "a", "cache_salt": ""}, Reason.INVALID),
        ({"prompt": "a" * 1_001}, Reason.TOO_LONG),
    ],
)
def test_completions_that_are_not_read(
    fields: dict[str, Any], why: Reason, executor: Executor
) -> None:
    """What is no single plain prompt is counted under its reason."""
    read = reader(card(), executor, limits=ReadLimits(chars_max=1_000))
    outcome = completion(read, **fields)
    assert isinstance(outcome, Inexact)
    assert read.stats.inexact == {why: 1} == {outcome.reason: 1}


async def test_long_lists_of_token_ids_are_hashed_in_steps(executor: Executor) -> None:
    """Their blocks are the same, the salt in the first one and the adapter in all."""
    extras, ids = Extras("adapter"), [number % 100 for number in range(1_000)]
    request = CompletionRequest(prompt=ids, cache_salt="salt")
    whole = await reader(card(), executor).read_completion(request, extras)
    steps = reader(card(), executor, limits=ReadLimits(tokens_now_max=100))
    assert await steps.read_completion(request, extras) == whole


@pytest.mark.parametrize("prompt", ["a " * 100_000, [1] * 50])
async def test_what_is_too_long_for_certain_is_not_read(prompt: Any, executor: Executor) -> None:
    """By the length of the text, or of the list; how long it is at least is known."""
    request = CompletionRequest(prompt=prompt)
    outcome = await reader(card(), executor).read_completion(request, tokens_max=50)
    assert isinstance(outcome, Inexact)
    assert outcome.reason is Reason.TOO_LONG
    assert outcome.tokens_min >= 50


async def test_a_heavy_chat_is_rendered_in_a_thread(executor: Executor) -> None:
    """And reads the same."""
    request = ChatRequest(messages=[{"role": "user", "content": f"{n}"} for n in range(700)])
    at_once = reader(card(), executor).read_chat_now(request)
    assert await reader(card(), executor).read_chat(request, heavy=True) == at_once


@pytest.mark.parametrize("prompt", ["a", ["a"]])
def test_one_prompt_in_a_list_is_one_prompt(prompt: Any, executor: Executor) -> None:
    """A batch of one is read like the prompt itself."""
    outcome = completion(reader(card(), executor), prompt=prompt)
    assert isinstance(outcome, Prompt)
    assert outcome.tokens == 1


@pytest.mark.parametrize(
    ("of", "why", "problem"),
    [
        (ModelCard("m", b"", "x"), Reason.NO_TOKENIZER, "has no tokenizer"),
        (ModelCard("m", b"rubbish", "x"), Reason.NO_TOKENIZER, "cannot be read"),
        (card(special_tokens={"eos_token": "</s>"}), Reason.NO_TOKENIZER, "eos_token"),
        (card(template=None), Reason.NO_TEMPLATE, "has no chat template"),
        (card(template="{% if %}"), Reason.NO_TEMPLATE, "does not compile"),
    ],
)
def test_a_card_of_no_use_says_why(
    of: ModelCard, why: Reason, problem: str, executor: Executor
) -> None:
    """A bad card makes a reader whose chats go by load, and tells what is wrong."""
    read = reader(of, executor)
    outcome = read.read_chat_now(ChatRequest(messages=[user("hi")]))
    assert isinstance(outcome, Inexact)
    assert outcome.reason == why
    assert problem in read.problem


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"truncate_prompt_tokens": 3}, Reason.TRUNCATION),
        ({"mm_processor_kwargs": {"a": 1}}, Reason.MULTIMODAL),
        ({"chat_template": "x"}, Reason.REQUEST_TEMPLATE),
        ({"messages": []}, Reason.INVALID),
    ],
)
def test_chats_that_are_not_read(fields: dict[str, Any], why: Reason, executor: Executor) -> None:
    """What is not followed is counted under its reason."""
    read = reader(card(), executor)
    outcome = read.read_chat_now(ChatRequest(**{"messages": [user("hi")], **fields}))
    assert isinstance(outcome, Inexact)
    assert read.stats.inexact == {why: 1} == {outcome.reason: 1}


def test_a_second_template_for_tools_is_not_followed(executor: Executor) -> None:
    """Named templates in a tokenizer_config.json make transformers choose by the tools."""
    named = {"chat_template": [{"name": "tool_use", "template": "x"}]}
    read = reader(card(tokenizer_config=named), executor)
    tools = [{"type": "function", "function": {"name": "f"}}]
    outcome = read.read_chat_now(ChatRequest(messages=[user("hi")], tools=tools))
    assert isinstance(outcome, Inexact)
    assert outcome.reason == Reason.UNSUPPORTED
    assert isinstance(read.read_chat_now(ChatRequest(messages=[user("hi")])), Prompt)


@pytest.mark.parametrize("kind", ["packaged", "metaspace"])
async def test_half_a_surrogate_pair_is_refused(kind: str, executor: Executor) -> None:
    """JSON can spell texts that are no Unicode; engines refuse them, and so do tokenizers."""
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'},
    }
    messages = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    read = reader(card(kind, "{{ messages[1].tool_calls[0].function.arguments.a }}"), executor)
    for outcome in (
        read.read_chat_now(ChatRequest(messages=messages)),
        await read.read_chat(ChatRequest(messages=messages)),
    ):
        assert isinstance(outcome, Inexact)
        assert outcome.reason == Reason.INVALID
    assert read._cache.stats.handles == 0


def test_no_handle_left_costs_reuse_alone(executor: Executor) -> None:
    """At the cache's bound on handles, prompts are read whole and right."""
    of = card()
    read = reader(of, executor, cache=PrefixCache(handles_max=0))
    request = ChatRequest(messages=[user("hello " * 40)])
    assert same(read.read_chat_now(request), whole(of, request))
    assert read._cache.stats.refused_handles == 1


async def test_what_only_the_library_can_read_is_long_sooner(executor: Executor) -> None:
    """Odd letters, which words decline, are left to a thread where plain ones are read at once."""
    read = reader(card(), executor)
    for text, long_texts in (("plain words " * 1_000, 0), ("ﬁ\u0344ẛ\u0323" * 500, 0)):
        assert isinstance(await read.read_completion(CompletionRequest(prompt=text)), Prompt)
        assert read.stats.long_texts == long_texts
    request = CompletionRequest(prompt="ﬁ\u0344ẛ\u0323" * 3_000)
    odd, other = await read.read_completion(request), reader(card(), executor)
    assert read.stats.long_texts == 1
    assert odd == other.read_completion_now(request)


LONG = ReadLimits(chars_now_max=50, chars_library_now_max=50, long_texts_max=2)


@pytest.mark.parametrize("kind", ["packaged", "metaspace"])
async def test_long_texts_are_bounded(kind: str, executor: Executor) -> None:
    """Beyond the bound on long texts in progress a request goes by load, and short ones go on."""
    of = card(kind)
    read = reader(of, executor, limits=LONG)
    requests = [ChatRequest(messages=[user(f"{i}\nline " * 3000)]) for i in range(5)]
    outcomes = await asyncio.gather(*(read.read_chat(request) for request in requests))
    busy = [outcome for outcome in outcomes if isinstance(outcome, Inexact)]
    assert [outcome.reason for outcome in busy] == [Reason.BUSY] * 3
    assert read.stats.inexact == {Reason.BUSY: 3}
    assert all(
        same(outcome, whole(of, request))
        for outcome, request in zip(outcomes, requests, strict=True)
        if isinstance(outcome, Prompt)
    )
    assert isinstance(await read.read_chat(ChatRequest(messages=[user("hi")])), Prompt)
    assert read._cache.stats.handles == 0


async def test_a_cancelled_read_leaves_nothing_behind(executor: Executor) -> None:
    """A client that goes away while its prompt is tokenized gives back its handle and its place."""
    read = reader(card(), executor, limits=LONG)
    task = asyncio.create_task(read.read_chat(ChatRequest(messages=[user("x\nline " * 9000)])))
    await asyncio.sleep(0)
    assert read._long_texts == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (read._long_texts, read._cache.stats.handles) == (0, 0)
    read._cache.check()


async def test_the_same_new_prompt_twice_at_once(executor: Executor) -> None:
    """Two readings of one new prompt that overlap both end right, and it is kept once."""
    of = card()
    read = reader(of, executor, limits=LONG)
    request = ChatRequest(messages=[user("some\nwords " * 2000)])
    both = await asyncio.gather(read.read_chat(request), read.read_chat(request))
    truth = whole(of, request)
    assert same(both[0], truth)
    assert same(both[1], truth)
    read._cache.check()


def test_a_closed_reader_frees_its_prompts(executor: Executor) -> None:
    """When a model's card changes, what its prompts took is free again."""
    cache = PrefixCache()
    read = reader(card(), executor, cache=cache)
    read.read_chat_now(ChatRequest(messages=[user("hi " * 100)]))
    assert cache.stats.bytes_used > 0
    read.close()
    assert (cache.stats.bytes_used, cache.stats.nodes) == (0, 0)


def test_without_blocks_a_prompt_has_its_length(executor: Executor) -> None:
    """Instances that publish no blocks still get prompts with exact lengths."""
    read = reader(card(block_size=0), executor)
    prompt = read.read_chat_now(ChatRequest(messages=[user("hi " * 100)]))
    assert isinstance(prompt, Prompt)
    assert prompt.tokens > 100
    assert prompt.hashes == []


def test_harmony_models_are_not_rendered_by_template(executor: Executor, tmp_path: Path) -> None:
    """Chats of models whose prompts vLLM builds by its own rules go by load."""
    library = LibraryTokenizer.from_buffer(samples.gpt2())
    library.add_special_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|call|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    of = ModelCard("m", (tmp_path / "tokenizer.json").read_bytes(), TINY_TEMPLATE)
    read = reader(of, executor)
    outcome = read.read_chat_now(ChatRequest(messages=[user("hi")]))
    assert isinstance(outcome, Inexact)
    assert outcome.reason == Reason.CHAT_RULES
    assert isinstance(completion(read, prompt="hi"), Prompt)
