import msgspec
import pytest

from router.degrade import for_model, shortened


@pytest.mark.parametrize(
    ("endpoint", "body", "becomes"),
    [
        ("chat", {"messages": []}, {"messages": [], "max_tokens": 9}),
        ("chat", {"max_completion_tokens": 50}, {"max_completion_tokens": 9}),
        ("chat", {"max_tokens": 50, "min_tokens": 20}, {"max_tokens": 9, "min_tokens": 9}),
        ("completions", {"max_tokens": None, "x": 1}, {"max_tokens": 9, "x": 1}),
        ("responses", {"input": "a"}, {"input": "a", "max_output_tokens": 9}),
        ("messages", {"max_tokens": 10}, {"max_tokens": 9}),
        ("completions", {"max_tokens": 9}, None),
        ("embeddings", {"input": "a"}, None),
    ],
)
def test_answers_become_no_longer_than_allowed(
    endpoint: str, body: dict[str, object], becomes: dict[str, object] | None
) -> None:
    """By the field that the endpoint has for it; shorter ones stay what they are."""
    found = shortened(msgspec.json.encode(body), endpoint, 9)
    assert (None if found is None else msgspec.json.decode(found)) == becomes


@pytest.mark.parametrize("body", [b'{"x":1e999}', b'{"x":"\xff"}', b"[" * 5000, b"[]"])
def test_what_cannot_be_written_anew_stays_what_it_is(body: bytes) -> None:
    """Fields that nobody reads are not checked before."""
    assert shortened(body, "chat", 9) is None
    assert for_model(body, "b") is None


def test_another_model_is_asked_for_the_same() -> None:
    """Every other field stays, in its place."""
    assert for_model(b'{"model":"a","messages":[1.5,"\xc3\xa9"]}', "b") == (
        b'{"model":"b","messages":[1.5,"\xc3\xa9"]}'
    )
