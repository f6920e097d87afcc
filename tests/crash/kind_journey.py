"""One store with messages of every kind that is killed, started and checked, again and again.

Owns: the checks of such a store after each start, and how it is brought to its end. One rule: that
of journey.py; what waits for its time goes on waiting over several kills, and is all looked for at
the end.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import store_check
from journey import ENTRIES, SLOTS, TALLY, Journey, Victim
from kind_check import KindCheck
from kinds import SETTINGS, KindLoad, Ledger, now_ms

DRAIN_TIMEOUT_S = 60.0
DUE_MS = 300  # after its time a message is there
LOOKS = 20
SETTLED_S = 1.0  # longer than any save that a clean stop might have forgotten


class KindJourney(Journey):
    """Kills on one store, in one flush mode, under all kinds of messages."""

    def __init__(
        self, folder: Path, flush: str, seed: int, conf: dict[str, str] | None = None
    ) -> None:
        super().__init__(folder, flush, seed, SETTINGS | (conf or {}))
        self.ledger = Ledger(seed)
        self.boots: list[int] = []

    def load(self, program: Victim, kept_log_files: int | None = None) -> KindLoad:  # type: ignore[override]
        self.rounds += 1
        return KindLoad(program.broker, self.ledger)

    def check(self, program: Victim) -> None:
        assert self.ledger.faults == [], self.ledger.faults[:5]
        looked = self._look(program)
        looked.check()
        looked.check_filter(program.broker)
        TALLY.checked += len(looked.found.records)

    def start(self, point: str = "", nth: int = 1, *, is_late: bool = True) -> Victim:
        """The last one is dead: what it wrote ends here, and what comes now is the next one's."""
        self.close()
        if self.log_files:
            self.boots.append(_written_end(self.store))
        return super().start(point, nth, is_late=is_late)

    def _look(self, program: Victim | None, *, is_stopped: bool = False) -> KindCheck:
        """The files of a broker that delivers on: held still, and looked at again if it was held
        in the midst of something."""
        for left in reversed(range(LOOKS)):
            if program is not None:
                program.process.send_signal(signal.SIGSTOP)
            try:
                found = store_check.check(
                    self.store,
                    slots=SLOTS,
                    entries=ENTRIES,
                    is_stopped=is_stopped,
                    levels=self.settings["messageDelayLevel"],
                )
            finally:
                if program is not None:
                    program.process.send_signal(signal.SIGCONT)
            if not found.faults or not left or program is None:
                break
            time.sleep(0.02 * (LOOKS - left))
        assert found.faults == [], "\n".join(found.faults)
        return KindCheck(self.ledger, found, self.boots)

    def _note_committed(self, program: Victim) -> None:
        pass

    def end(self) -> None:
        """Everything comes to its end; after a clean stop nothing comes twice."""
        program = self.start_and_check()
        load = KindLoad(program.broker, self.ledger, is_draining=True)
        self._drain(program)
        load.stop()
        self.check(program)
        assert program.stop() == 0, program.error_text()
        before = self._look(None, is_stopped=True)
        before.check()
        program = self.start_and_check()
        time.sleep(SETTLED_S)
        after = self._look(program)
        assert after.copy_count() == before.copy_count(), "something came again after a clean stop"
        assert program.stop() == 0, program.error_text()
        self.close()
        TALLY.acked += self.ledger.acked_count

    def _drain(self, program: Victim) -> None:
        """Until all that was promised has come, and nothing waits: neither what was stored twice
        on both sides of a kill, nor what nobody promised."""
        give_up = time.monotonic() + DRAIN_TIMEOUT_S
        last_end = -1
        while True:
            looked = self._look(program)
            left, log_end = looked.open_ends(), looked.found.log_end
            if not left and log_end == last_end and now_ms() > looked.last_due_ms() + DUE_MS:
                return
            assert time.monotonic() < give_up, f"{len(left)} are left at {now_ms()}: {left[:5]}"
            last_end = log_end
            time.sleep(0.5)


def _written_end(store: Path) -> int:
    """Where the records of a log end that nobody has repaired yet; torn ones do not count."""
    found = store_check.Found()
    store_check._check_log(store / "commitlog", found, is_stopped=False)
    return found.log_end
