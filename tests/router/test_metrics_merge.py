"""Pages of several workers as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import RequestMetrics, Sample
from router.metrics_merge import merge_pages


def page(requests: int, connections: int) -> str:
    """Return a page as a worker renders it."""
    metrics = RequestMetrics()
    for _ in range(requests):
        metrics.ended("m", "chat", "t", "ok", 200)
        metrics.rejected("malformed")
    open_now = Sample("http_connections_open", "From clients.", connections)
    by_model = Sample("index_blocks", "Blocks.", labels=("model",))
    by_model.values[("a b",)] = 7
    metrics.watch(lambda: [open_now, by_model])
    return metrics.render().decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what Prometheus reads in a page."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_add_up_and_gauges_stay_apart() -> None:
    """Two workers' requests are summed; each one's connections are its own."""
    found = samples(merge_pages({"0": page(2, 10), "1": page(3, 20)}))
    labels = frozenset({"model": "m", "endpoint": "chat", "outcome": "ok", "status": "2xx"}.items())
    assert found["multiplane_requests_total", labels] == 5
    for worker, connections in (("0", 10), ("1", 20)):
        key = frozenset({("worker", worker)})
        assert found["multiplane_http_connections_open", key] == connections
        key = frozenset({("worker", worker), ("model", "a b")})
        assert found["multiplane_index_blocks", key] == 7


def test_histograms_add_up() -> None:
    """Every bucket, the count and the sum."""
    pages = {}
    for worker in ("0", "1"):
        metrics = RequestMetrics()
        metrics._ttft.observe(0.2)
        metrics._ttft.observe(30.0)
        pages[worker] = metrics.render().decode()
    found = samples(merge_pages(pages))
    name = "multiplane_request_ttft_seconds"
    assert found[f"{name}_bucket", frozenset({("le", "0.25")})] == 2
    assert found[f"{name}_count", frozenset()] == 4
    assert found[f"{name}_sum", frozenset()] == 60.4


def test_what_has_ended_still_counts() -> None:
    """Counters of a page that is only counted add up; its gauges are nobody's any more."""
    ended = merge_pages({}, (page(2, 10), page(3, 20)))
    assert not [key for key in samples(ended) if key[0].endswith("connections_open")]
    found = samples(merge_pages({"0": page(4, 30)}, (ended,)))
    labels = frozenset({"model": "m", "endpoint": "chat", "outcome": "ok", "status": "2xx"}.items())
    assert found["multiplane_requests_total", labels] == 9
    open_now = {key: value for key, value in found.items() if key[0].endswith("connections_open")}
    assert list(open_now.values()) == [30]


def test_one_page_keeps_its_meaning() -> None:
    """Comments, types and values survive; nobody's page is an empty page."""
    alone = merge_pages({"0": page(1, 1)})
    assert "# TYPE multiplane_requests_total counter" in alone
    assert merge_pages({}) == ""


@given(st.dictionaries(st.sampled_from("abc"), st.text()))
def test_nonsense_is_left_out(pages: dict[str, str]) -> None:
    """A page that is none costs only itself."""
    merged = merge_pages({**pages, "x": page(1, 1)})
    assert 'multiplane_http_connections_open{worker="x"} 1.0' in merged
