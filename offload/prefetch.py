"""Layers read ahead: while one is computed, the next ones are read, verified and kept ready. On one thread of its own.

A reader that hangs is left behind: it writes to slabs that are its own, so nothing it does later can be seen.
"""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import TypeVar

import numpy as np

from qkv.errors import LayerLost

MOST_AHEAD = 8
LOOK_SECONDS = 1.0  # a collector that calls `stop` on the reader's own thread, as it is about to wait, wakes nobody
T = TypeVar("T")


class Prefetch:
    """Reads layers 0, 1, ... in order, at most `ahead` of them at a time beyond the one that is used.

    read     fills a slab (uint8, writable, of slab_bytes) with a layer; raises if it cannot
    land     called with a layer that was read and its slab, to bring it nearer; never begun once `stop` has returned
    seconds  how long `take` waits for one layer
    at_end   called on the reader's thread when it will read no more
    ahead    slabs to begin with; grows up to MOST_AHEAD where a layer was waited for although the reader had been idle:
             loads and computations then take turns in being the longer one
    """

    def __init__(
        self,
        read: Callable[[int, memoryview], None],
        layers: int,
        slab_bytes: int,
        *,
        seconds: float,
        ahead: int = 2,
        at_end: Callable[[], None] = lambda: None,
        land: Callable[[int, memoryview], None] = lambda layer, slab: None,
    ) -> None:
        self._read, self._layers, self._slab_bytes, self._seconds = read, layers, slab_bytes, seconds
        self._land, self._landing = land, threading.RLock()  # R: a collector may call `stop` on the reader's thread
        self._changed, self._at_end = threading.Condition(), at_end
        self._free: deque[memoryview] = deque()
        self._ready: dict[int, memoryview] = {}
        self._error: tuple[int, BaseException] | None = None
        self._stopped = False
        self._was_idle = False
        self.ahead = 0
        self.stalls: list[float] = []  # seconds that `take` waited, by layer
        self.loads: list[float] = []  # seconds that reading took, by layer
        for _ in range(min(ahead, layers)):
            self._add_slab()
        threading.Thread(target=self._run, name="qkv prefetch", daemon=True).start()

    def take(self, layer: int) -> memoryview:
        """The layer's slab; give it back with `done`. Raises LayerLost (damaged, failed, late), and from then on."""
        began = perf_counter()
        with self._changed:
            there = self._changed.wait_for(lambda: layer in self._ready or self._error or self._stopped, self._seconds)
            stall = perf_counter() - began
            self.stalls.append(stall)
            if layer in self._ready:
                if stall > 1e-3 and self._was_idle and self.ahead < min(MOST_AHEAD, self._layers):
                    self._add_slab()
                self._was_idle = False
                return self._ready.pop(layer)
            if self._error is not None:
                number, error = self._error
                raise LayerLost(number, str(error)) from error
            self._stopped = True
            why = "loading was stopped" if there else f"it took longer than {self._seconds:g} s"
            raise LayerLost(layer, why) from (None if there else TimeoutError(why))

    def done(self, slab: memoryview) -> None:
        """The slab may be filled again."""
        with self._changed:
            self._free.append(slab)
            self._changed.notify_all()

    def stop(self) -> None:
        """Read no further layer. Returns at once, or when the layer that is landing has landed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        with self._landing:
            return

    def _add_slab(self) -> None:
        slab = np.empty(self._slab_bytes, np.uint8)
        slab.fill(0)  # touched now: page faults are slower than the disk
        with self._changed:
            self._free.append(slab.data)
            self.ahead += 1
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._read_all()
        finally:
            self._at_end()

    def _read_all(self) -> None:
        for layer in range(self._layers):
            with self._changed:
                self._was_idle = self._was_idle or not self._free
                while not self._free and not self._stopped:
                    self._changed.wait(LOOK_SECONDS)
                if self._stopped:
                    return
                slab = self._free.popleft()
            began = perf_counter()
            try:
                self._read(layer, slab)
                with self._landing:
                    if self._stopped:
                        return
                    self._land(layer, slab)
            except BaseException as error:  # whatever it is, the thread that waits must hear of it
                with self._changed:
                    self._error = layer, error
                    self._changed.notify_all()
                return
            with self._changed:
                self.loads.append(perf_counter() - began)
                self._ready[layer] = slab
                self._changed.notify_all()


def within(seconds: float, call: Callable[[float], T], discard: Callable[[T], None] = lambda made: None) -> T:
    """`call(deadline)` on a thread of its own, for at most `seconds`. discard: what it gives after that.

    Raises TimeoutError, and what the call raises.
    """
    made: list[T] = []
    errors: list[BaseException] = []
    ended, late = threading.Condition(), False

    def run() -> None:
        try:
            found = call(monotonic() + seconds)
        except BaseException as error:
            with ended:
                errors.append(error)
                ended.notify_all()
            return
        with ended:
            made.append(found)
            ended.notify_all()
            unwanted = late
        if unwanted:
            discard(found)

    threading.Thread(target=run, name="qkv store", daemon=True).start()
    with ended:
        if not ended.wait_for(lambda: made or errors, seconds):
            late = True
            raise TimeoutError(f"the file system did not answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return made[0]


def ideal(loads: list[float], computes: list[float]) -> float:
    """The shortest time that loading and then computing these layers can take, one load and one computation at a time.

    max over k of (loads up to k) + (computations from k on): the makespan of a two-machine flow shop.
    """
    return max(sum(loads[: k + 1]) + sum(computes[k:]) for k in range(len(loads)))
