"""SIGTERM and SIGINT: who is at work saves before it ends. No torch here."""

import signal
import time
from types import FrameType, TracebackType

from longlens.errors import Interrupted, LongLensError


class StopSignals:
    """Within it, SIGTERM and SIGINT stop at once, as Ctrl-C does; after ``defer`` they only set ``asked``, and one
    more, some seconds later, stops at once. What was stopped at once ends as ``Interrupted``.

    Not one that comes right after the first: a terminal or a scheduler sends a signal to all processes of a job, and
    those that have started others pass it on to them. A signal that was ignored before, as that of a job in the
    background, is heard. Outside of the main thread no signal arrives, and nothing happens.
    """

    PATIENCE = 2.0  # seconds

    def __init__(self) -> None:
        self.asked = False
        self.deferred = False
        self.since = 0.0
        self.done = "stopped before the first step"  # what a stop at once says
        self.before = {}

    def defer(self, done: str) -> "StopSignals":
        """From now on, whoever works looks at ``asked``; ``done`` says what a stop at once leaves behind."""
        self.deferred = True
        self.done = done
        return self

    def __enter__(self) -> "StopSignals":
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self._handle)
        except ValueError:  # not in the main thread
            pass
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = not self.asked
        if first:
            self.asked = True
            self.since = time.monotonic()
        if not self.deferred or (not first and time.monotonic() - self.since > self.PATIENCE):
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's
        # A terminal also stops the processes that this one waits for, whose end may be noticed first.
        failed_by_it = self.asked and not self.deferred and isinstance(error, Exception)
        if isinstance(error, KeyboardInterrupt) or (failed_by_it and not isinstance(error, LongLensError)):
            raise Interrupted(self.done) from error
