import msgspec
import pytest

from controlplane.predictor.samples import Joiner
from schemas.bus import Finished, LoadReport, RouteBatch, Routed, RouteEvent
from tests.predictor.samples import batches


def routed(name: str = "a", **fields: object) -> Routed:
    """Returns a decision."""
    return Routed(name, "i", 0.0, prompt_tokens=100, new_tokens=40, **fields)  # type: ignore[arg-type]


def finished(name: str = "a", outcome: str = "ok", status: int = 200) -> Finished:
    """Returns an end."""
    return Finished(name, "i", outcome, status, 0.0, ttft_s=0.9, duration_s=2.0)


def test_a_request_becomes_a_sample_of_its_service() -> None:
    """What it waited before it was sent is no part of its times."""
    joiner = Joiner()
    joiner.load(LoadReport("i", 1, 0, 0.0, 3, 0, kv_usage=0.75))
    sent = routed(queue_s=0.5, tokenize_s=0.1, batch_size=3, queued_tokens=7, head=5, tenant="t")
    (sample,) = joiner.batch(RouteBatch("r", 1, 0, 0.0, [sent, finished()]))
    assert sample.ttft_s == pytest.approx(0.3)
    assert sample.total_s == 2.0
    known = sample.known
    assert (known.prompt_tokens, known.new_tokens, known.batch_size) == (100, 40, 3)
    assert (known.queued_tokens, known.kv_usage, known.head, known.tenant) == (7, 0.75, 5, "t")
    assert len(joiner) == 0


def test_recent_latencies_are_those_of_the_same_router() -> None:
    """Later decisions of a router carry what its requests took before."""
    joiner = Joiner()
    joiner.batch(RouteBatch("r", 1, 0, 0.0, [routed(), finished()]))
    events = [routed("b"), finished("b")]
    (mine,) = joiner.batch(RouteBatch("r", 1, 1, 0.0, list(events)))
    (other,) = joiner.batch(RouteBatch("s", 1, 0, 0.0, list(events)))
    assert mine.known.recent_ttft_s == pytest.approx(0.9)
    assert mine.known.recent_total_s == 2.0
    assert other.known.recent_total_s == 0.0


def test_failures_teach_nothing_and_retries_no_first_byte() -> None:
    """Refused, broken and unmatched requests are counted and left out."""
    joiner = Joiner()
    events = [
        *(routed("a"), finished("a", "client_gone")),
        *(routed("b"), finished("b", status=400)),
        *(routed("c"), finished("c", "retried", 0)),
        *(routed("c", attempt=1), finished("c")),
        finished("unknown"),
    ]
    (sample,) = joiner.batch(RouteBatch("r", 1, 0, 0.0, events))
    assert sample.ttft_s is None
    assert dict(joiner.counts) == {"failed": 3, "joined": 1, "unmatched": 1}


@pytest.mark.parametrize("fields", [{"duration_s": 1e15}, {"ttft_s": 1e15}])
def test_times_that_no_request_takes_teach_nothing(fields: dict[str, float]) -> None:
    """One of them in a thousand would spoil the mean of all others."""
    joiner = Joiner()
    absurd = msgspec.structs.replace(finished("a"), **fields)
    events: list[RouteEvent] = [routed("a"), absurd, routed("b"), finished("b")]
    (sample,) = joiner.batch(RouteBatch("r", 1, 0, 0.0, events))
    assert sample.known.recent_total_s == 0.0
    assert dict(joiner.counts) == {"absurd": 1, "joined": 1}


def test_what_never_ends_is_forgotten_at_the_bound() -> None:
    """The oldest go."""
    joiner = Joiner(open_max=2, names_max=2)
    for name in "abc":
        joiner.load(LoadReport(name, 1, 0, 0.0, 0, 0))
        joiner.batch(RouteBatch(name, 1, 0, 0.0, [routed(name)]))
    assert len(joiner) == 2
    assert joiner.counts["forgotten"] == 1
    assert joiner.batch(RouteBatch("a", 1, 1, 0.0, [finished("a")])) == []


def test_a_stream_is_joined_whole() -> None:
    """Every request that ended well is a sample."""
    joiner = Joiner()
    assert sum(len(joiner.batch(batch)) for batch in batches(500)) == 500
