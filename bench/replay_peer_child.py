"""Runs inside the peer's environment: replays one trace with the peer's offline replayer.

    python -m bench.replay_peer_child SETUP.json OUTCOME.json

Standard library and the peer alone. `bench.replay_peer` writes the one file and reads the other.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def replay(setup: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of one replay, times in milliseconds as the peer has them."""
    from dynamo import _core as peer  # type: ignore[import-not-found]

    config = peer._normalize_mocker_config({"engine": setup["engine"]})
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = peer.run_mocker_trace_replay(
        [setup["trace"]],
        extra_engine_args=config,
        num_workers=setup["instances"],
        router_mode=setup["router"],
        trace_block_size=setup["trace_block_tokens"],
        capture_per_request=True,
        capture_planner_details=False,
    )
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    names = ("arrival_time_ms", "ttft_ms", "e2e_latency_ms", "input_length", "output_length")
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "requests": [
            [
                *(each[name] for name in names),
                each["admission_history"][0]["reused_input_tokens"],
                each["decode_worker_idx"],
            ]
            for each in result.per_request
        ],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(replay(json.loads(Path(sys.argv[1]).read_text()))))
