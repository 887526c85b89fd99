"""What the house allows, as tables for `test_tidy`. Every exception has a reason: add one to yours.

Paths are patterns of `fnmatch` relative to the repository root.
"""

from __future__ import annotations

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500

TEXT_SUFFIXES = frozenset(
    {
        *(".conf", ".cfg", ".ini", ".json", ".service", ".sh", ".toml", ".tpl", ".yaml", ".yml"),
        *(".css", ".html", ".jinja", ".js", ".md", ".py", ".txt"),
        "",  # Makefile, Dockerfile, .ci/run
    }
)

STRAY_SUFFIXES = frozenset({".whl", ".gz", ".zip", ".zst", ".so", ".pyc", ".log", ".prof", ".orig"})

# Who may import whom, by the longest prefix that fits. `controlplane.cli` starts everything, so
# nothing but the console script imports it; the tests are nobody's library.
FIRST_PARTY: dict[str, tuple[str, ...]] = {
    "schemas": ("schemas",),
    "controlplane.core": ("controlplane.core", "schemas"),
    "controlplane.bus": ("controlplane.bus", "controlplane.core", "schemas"),
    "controlplane.cli": ("controlplane", "sidecar", "router", "lab", "bench", "schemas"),
    "controlplane": ("controlplane", "schemas"),
    "sidecar": ("sidecar", "controlplane", "schemas"),
    "router": ("router", "controlplane", "schemas"),
    "lab": ("lab", "sidecar", "router", "controlplane", "schemas"),
    "bench": ("bench", "lab", "sidecar", "router", "controlplane", "schemas"),
}
ONLY_OWN = ("controlplane.cli", "tests")

# What the inner packages may use beside the standard library.
THIRD_PARTY: dict[str, frozenset[str]] = {
    "schemas": frozenset({"msgspec"}),
    "controlplane.core": frozenset({"msgspec", "numpy", "xxhash", "sortedcontainers"}),
}

# msgspec and numpy are part of the language here; any other library is met by the files named,
# everyone else by what they offer. Tests and benchmarks use what they like.
EVERYWHERE = frozenset({"msgspec", "numpy"})
FOREIGN: dict[str, dict[str, str]] = {
    "PIL": {"lab/report_plots.py": "makes pictures smaller"},
    "aiohttp": {
        "controlplane/dashboard/server.py": "serves the page and its stream",
        "controlplane/http_client.py": "small requests beside the data plane",
        "sidecar/engine_http.py": "scrapes the engine",
        "lab/server*.py": "the emulated engine's HTTP server",
    },
    "httptools": {"router/http_head.py": "parses heads; bodies and framing are ours"},
    "jinja2": {
        "router/chat_template.py": "runs models' templates, sandboxed",
        "router/template_content.py": "reads a template to see which form of content it wants",
        "router/template_habits.py": "tries a template out, as vLLM does for the Messages API",
        "lab/server_model.py": "the emulated engine renders as vLLM does",
    },
    "matplotlib": {
        "lab/report_plots.py": "draws the report's pictures",
        "lab/report.py": "names the type of a picture",
    },
    "nats": {"controlplane/bus/nats_link.py": "the only connection to the server"},
    "prometheus_client": {
        "router/metrics.py": "the router's exporter",
        "sidecar/exporter.py": "the sidecar's exporter",
        "controlplane/exporter.py": "the services' exporter",
        "lab/server_metrics.py": "the emulated engine's /metrics, as vLLM names them",
    },
    "opentelemetry": {"router/tracing.py": "makes spans and sends them"},
    "pyarrow": {"controlplane/audit/parquet.py": "writes decisions as Parquet"},
    "rich": {
        "controlplane/cli/*.py": "what commands print",
        "lab/summary.py": "tables of results",
        "lab/screen.py": "the demo's live view",
        "lab/up.py": "what the demo prints",
        "lab/up_replay.py": "how far a replay is",
    },
    "sortedcontainers": {"controlplane/core/*.py": "ordered queues"},
    "tokenizers": {
        "router/tokenizer.py": "text to tokens on the request path",
        "lab/server_model.py": "the emulated engine's own",
    },
    "typer": {"controlplane/cli/*.py": "the command line"},
    "uvloop": {
        "controlplane/runtime.py": "starts every service's loop",
        "lab/server.py": "starts the emulated engine's loop",
    },
    "xgboost": {"controlplane/predictor/trees.py": "learns; what it learnt is ours"},
    "xxhash": {
        "controlplane/core/hashing.py": "block hashes",
        "lab/engine_types.py": "the emulated engine's own block hashes, which are not ours",
    },
    "zmq": {
        "sidecar/zmq_source.py": "vLLM's event socket, our end",
        "lab/publisher.py": "vLLM's event socket, the engine's end",
    },
}
OPTIONAL: dict[str, str] = {
    "PIL": "lab",
    "matplotlib": "lab",
    "opentelemetry": "tracing",
    "pyarrow": "audit",
    "xgboost": "predictor",
}
"""Libraries of an extra, by its name: imported only where needed, with advice if absent."""
DISTRIBUTIONS = {
    "PIL": "pillow",
    "nats": "nats-py",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "xgboost": "xgboost-cpu",
    "zmq": "pyzmq",
}

# Events and the time come in, values and effects go out: no clock, no I/O, no environment.
PURE = (
    "schemas/*.py",
    "controlplane/core/*.py",
    "controlplane/audit/choice.py",
    "controlplane/audit/follow.py",
    "controlplane/audit/heard.py",
    "controlplane/audit/hits.py",
    "controlplane/audit/lines.py",
    "controlplane/audit/outcomes.py",
    "controlplane/audit/report.py",
    "controlplane/audit/selection.py",
    "controlplane/audit/sets.py",
    "controlplane/audit/statements.py",
    "controlplane/audit/story.py",
    "controlplane/audit/table.py",
    "controlplane/audit/trace.py",
    "controlplane/audit/verify.py",
    "controlplane/audit/why.py",
    "sidecar/changes.py",
    "sidecar/engine_stream.py",
    "sidecar/memories.py",
    "sidecar/metrics_text.py",
    "sidecar/mirror.py",
    "sidecar/orphans.py",
    "sidecar/relay.py",
    "sidecar/rivals.py",
    "router/breaker.py",
    "router/card_check.py",
    "router/chat_messages.py",
    "router/degrade.py",
    "router/directory.py",
    "router/http_chunks.py",
    "router/http_head.py",
    "router/http_reader.py",
    "router/keys.py",
    "router/messages_chat.py",
    "router/metrics_merge.py",
    "router/prefix_cache.py",
    "router/prefix_records.py",
    "router/prefixes.py",
    "router/prompt.py",
    "router/responses_chat.py",
    "router/segments.py",
    "router/standing.py",
    "router/surface.py",
    "router/tally.py",
    "router/template_content.py",
    "router/template_habits.py",
    "router/tenant_gate.py",
    "router/tenant_peers.py",
    "router/tenants.py",
    "router/unreadable.py",
    "router/usage.py",
    "router/words.py",
    "lab/baselines*.py",
    "lab/block_pool.py",
    "lab/capacity.py",
    "lab/engine.py",
    "lab/engine_types.py",
    "lab/profiles.py",
    "lab/replay_agenda.py",
    "lab/replay_detector.py",
    "lab/replay_feed.py",
    "lab/replay_instance.py",
    "lab/replay_metrics.py",
    "lab/replay_prompts.py",
    "lab/replay_router.py",
)
IMPURE_MODULES = frozenset(
    {
        *("asyncio", "concurrent", "multiprocessing", "queue", "signal", "subprocess", "threading"),
        *("http", "select", "selectors", "socket", "ssl", "urllib.request"),
        *("os", "pathlib", "shutil", "tempfile", "getpass", "platform"),
        *("contextvars", "importlib", "logging", "warnings"),
        *("secrets", "time", "uuid"),
        *("aiohttp", "nats", "prometheus_client", "uvloop", "zmq"),
    }
)
IMPURE_CALLS = frozenset({"input", "open", "print"})
SEEDED = frozenset({"Random", "default_rng", "Generator", "PCG64"})
CLOCKS = frozenset({"datetime.now", "datetime.utcnow", "datetime.today", "date.today"})

# A test waits for a condition with a deadline. These are the deadline loops, and the slow peers.
SLEEPERS: dict[str, str] = {
    "tests/live/test_up.py": "waits for processes to end, with a deadline",
    "tests/bus/test_nats_bus.py": "plays a reader that is too slow, in its handler",
    "tests/vllm/harness.py": "waits for servers, with a deadline",
    "tests/vllm/kv_events.py": "waits for events, with a deadline",
    "tests/vllm/sim_executor.py": "is the simulated forward pass",
}
SKIPPERS: dict[str, str] = {
    "tests/deploy/test_balancer.py": "HAProxy is not on every machine; CI installs it",
    "tests/bus/test_embedded.py": "the parent-death signal exists on Linux only",
    "tests/router/test_hostile*.py": "thousands of connections need as many file descriptors",
}


def _spelled(*words: str) -> list[str]:
    """Returns words that are written with a bar here, so that this file does not break the rule."""
    return [word.replace("|", "") for word in words]


UNFINISHED = _spelled("TO|DO", "FIX|ME", "# XX|X", "NotImplemented|Error")
EXCUSED = _spelled("pytest.sk|ip", "mark.sk|ip", "xf|ail", "importor|skip")
MACHINE = _spelled("/wo|rk/", "/tmp/ba|sh", ".libr|ary/", "find-li|nks")
