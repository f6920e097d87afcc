"""Wall clocks that are set forward and back under load, across kills as well.

Owns: what a wrong clock may do to a broker: nothing that a client would notice. One rule: time only
moves forward in the log, whatever the clock says, and the broker goes on answering.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from journey import SOME_MODES, Journey, wait_until

HOUR_MS = 3_600_000
STEPS_MS = (HOUR_MS, 0, -HOUR_MS, 90_000, -50 * HOUR_MS)


@pytest.mark.parametrize("mode", SOME_MODES)
def test_a_clock_that_steps_disturbs_nobody(tmp_path: Path, mode: str) -> None:
    # Files are as old as the kernel's clock says, which does not step: keep them for longer.
    with Journey(tmp_path, mode, seed=11, conf={"fileReservedTime": "720"}) as journey:
        for last_ms in (HOUR_MS, -HOUR_MS):
            program = journey.start_and_check("clock")
            load = journey.load(program, kept_log_files=None)
            for step_ms in (*STEPS_MS, last_ms):
                journey.control.write_text(str(step_ms))
                time.sleep(0.1)
                acked, seen = journey.history.acked_count, journey.history.seen_count
                wait_until(
                    lambda acked=acked, seen=seen: (
                        journey.history.acked_count > acked + 50
                        and journey.history.seen_count > seen + 50
                    ),
                    30,
                    f"load after a step to {step_ms} ms; {program.error_text()}",
                )
            program.kill()
            load.stop()
        journey.end()
