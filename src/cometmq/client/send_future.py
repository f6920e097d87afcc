"""The future of a send that another thread may wait for, cheap while nobody does.

Owns: SendFuture, a concurrent.futures.Future. The library's own makes a lock, a condition and lists
for each, which costs as much as a third of a send; most futures of pipelined sends only run a
callback, or are looked at when they are done. Here the condition is made when somebody asks for it.

One rule: `_state` changes under `_CHANGE`, and its end is written under the future's own condition
as well once that was made. So whoever holds the condition (a waiter, `concurrent.futures.wait`)
knows that no end is written meanwhile, and whoever makes one sees the end if there was one.
Of the two locks the condition's comes first; `_CHANGE` is held for a few instructions only, and
nothing is called under it. It may be taken twice by one thread: a signal handler may send, too.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import InvalidStateError
from concurrent.futures._base import (
    CANCELLED,
    CANCELLED_AND_NOTIFIED,
    FINISHED,
    LOGGER,
    PENDING,
    RUNNING,
)
from typing import Any, TypeVar

T = TypeVar("T")
Callback = Callable[[concurrent.futures.Future[T]], Any]

_CHANGE = threading.RLock()
_ENDED = (FINISHED, CANCELLED, CANCELLED_AND_NOTIFIED)


class SendFuture(concurrent.futures.Future[T]):
    """Pending until the loop takes the send, then running: from there on it can't be cancelled."""

    # What is the same for all until something happens to one of them.
    _made: threading.Condition | None = None
    _state = PENDING
    _result: T | None = None
    _exception: BaseException | None = None
    _waiters: Sequence[Any] = ()  # type: ignore[assignment]
    _done_callbacks: Sequence[Callback[T]] = ()

    def __init__(self, callback: Callback[T] | None = None) -> None:
        # Not super().__init__(): it makes all that is spared here.
        if callback is not None:
            self._done_callbacks = (callback,)

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """What the library's own methods and functions lock, wait for and notify."""
        made = self._made
        if made is None:
            fresh = threading.Condition()
            with _CHANGE:
                made = self._made
                if made is None:
                    self._waiters = []
                    self._made = made = fresh
        return made

    # ------------------------------------------------------------------------------------- looking

    def done(self) -> bool:
        return self._state in _ENDED

    def running(self) -> bool:
        return self._state == RUNNING

    def cancelled(self) -> bool:
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED)

    def result(self, timeout: float | None = None) -> T:
        if self._state == FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state == FINISHED:
            return self._exception
        return super().exception(timeout)

    # -------------------------------------------------------------------------------------- changes

    @staticmethod
    def begin_all(futures: Iterable[SendFuture[Any]]) -> None:
        """The loop takes these sends; those that were cancelled before stay so."""
        cancelled: list[SendFuture[Any]] = []
        with _CHANGE:
            for one in futures:
                if one._state == PENDING:
                    one._state = RUNNING
                else:
                    cancelled.append(one)
        for one in cancelled:
            one.set_running_or_notify_cancel()

    def set_running_or_notify_cancel(self) -> bool:
        with self._condition:
            with _CHANGE:
                before = self._state
                if before == PENDING:
                    self._state = RUNNING
                elif before == CANCELLED:
                    self._state = CANCELLED_AND_NOTIFIED
            if before == PENDING:
                return True
            if before != CANCELLED:
                raise InvalidStateError(f"a send is begun once; its future is {before}")
            for waiter in self._waiters:
                waiter.add_cancelled(self)
            return False

    def cancel(self) -> bool:
        condition = self._condition
        with condition:
            with _CHANGE:
                before = self._state
                if before == PENDING:
                    self._state = CANCELLED
            if before != PENDING:
                return before in (CANCELLED, CANCELLED_AND_NOTIFIED)
            condition.notify_all()
        self._call(self._done_callbacks)
        return True

    def set_result(self, result: T) -> None:
        with _CHANGE:
            is_quick = self._state == RUNNING and self._made is None
            if is_quick:
                self._result = result
                self._state = FINISHED
        if not is_quick:
            self._end(result, None)
        if self._done_callbacks:
            self._call(self._done_callbacks)

    def set_exception(self, exception: BaseException | None) -> None:
        self._end(None, exception)
        self._call(self._done_callbacks)

    def _end(self, result: T | None, error: BaseException | None) -> None:
        """The way for all, waiters or none."""
        condition = self._condition
        with condition:
            with _CHANGE:
                if self._state in _ENDED:
                    raise InvalidStateError(f"a send ends once; its future is {self._state}")
                self._result, self._exception = result, error
                self._state = FINISHED
            for waiter in self._waiters:
                if error is None:
                    waiter.add_result(self)
                else:
                    waiter.add_exception(self)
            condition.notify_all()

    # ------------------------------------------------------------------------------------ callbacks

    def add_done_callback(self, fn: Callback[T]) -> None:
        with _CHANGE:
            if self._state not in _ENDED:
                self._done_callbacks = (*self._done_callbacks, fn)
                return
        self._call((fn,))

    def _call(self, callbacks: Sequence[Callback[T]]) -> None:
        """After the end: nothing is added any more."""
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                LOGGER.exception("exception calling callback for %r", self)
