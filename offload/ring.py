"""Layers in a ring, read ahead: while one is computed, the next streamed ones are read into slabs, round and round."""

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter

import torch

from qkv.errors import LayerLost
from qkv.offload.device import zeros
from qkv.offload.prefetch import LOOK_SECONDS
from qkv.offload.tier import PAGE, slab_bytes


class Slab:
    """Room for one layer's rows, whole pages. rows: where the kernels read; host: where a reader writes, the same on a
    CPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        size, on_gpu = slab_bytes(size), device.type == "cuda"
        with torch.inference_mode(False):
            if on_gpu:
                self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
                self.rows = torch.zeros(size, dtype=torch.uint8, device=device)
            else:
                self.host = self.rows = zeros(1, size, device, PAGE)[0]
                self.host.fill_(0)  # touched now, not while reading
        self.data = self.host.numpy().data
        self._used: torch.cuda.Event | None = None

    def arrived(self, stream: "torch.cuda.Stream | None") -> None:
        """The reader has filled `host`: on a GPU, copy it on a stream of its own, behind what still reads the slab."""
        if stream is None:
            return
        with torch.cuda.stream(stream):
            if self._used is not None:
                stream.wait_event(self._used)
            self.rows.copy_(self.host, non_blocking=True)
        stream.synchronize()

    def fetch(self, begin: int, end: int) -> None:
        """What was written to these bytes of `rows` is in `host` too."""
        if self.rows is not self.host:
            self.host[begin:end].copy_(self.rows[begin:end])

    def left(self) -> None:
        """Nobody will start to read the slab any more; on a GPU some may still be at it."""
        if self.rows is not self.host:
            self._used = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._used.record()


class Ring:
    """Reads `layers` round and round, as far ahead as there are slabs. `take` is for one thread.

    read     fills a slab's host rows with a layer; raises if it cannot
    seconds  how long `take` waits
    """

    def __init__(
        self, read: Callable[[int, memoryview], None], layers: list[int], slabs: list[Slab], seconds: float
    ) -> None:
        self._read, self._layers, self._seconds = read, layers, seconds
        self._changed = threading.Condition()
        self._free, self._ready = deque(slabs), dict[int, Slab]()
        self._next, self._loading, self._turn = 0, -1, 0  # _turn: what was begun in an earlier one is thrown away
        self._current: tuple[int, Slab] | None = None
        self._error: tuple[int, BaseException] | None = None
        self._stopped = False
        self.stalls = self.loads = 0.0  # seconds waited, and spent reading
        device = slabs[0].rows.device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]  # as above
        threading.Thread(target=self._run, name="qkv ring", daemon=True).start()

    def take(self, layer: int) -> Slab:
        """The layer's slab, until the next one is taken. Raises LayerLost (damaged, failed, late)."""
        if self._current is not None and self._current[0] == layer:
            return self._current[1]
        began = perf_counter()
        with self._changed:
            self._leave()
            if self._expected() != layer:
                self._turn_to(layer)
            self._changed.notify_all()
            there = self._changed.wait_for(lambda: layer in self._ready or self._error or self._stopped, self._seconds)
            self.stalls += perf_counter() - began
            if layer in self._ready:
                self._current = layer, self._ready.pop(layer)
                return self._current[1]
            if self._error is not None:
                number, error = self._error
                self._error = None
                raise LayerLost(number, str(error)) from error
            why = "reading was stopped" if there else f"it took longer than {self._seconds:g} s"
            raise LayerLost(layer, why) from (None if there else TimeoutError(why))

    def stop(self) -> None:
        """Read no more. Returns at once."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _leave(self) -> None:
        if self._current is not None:
            self._current[1].left()
            self._free.append(self._current[1])
            self._current = None

    def _expected(self) -> int:
        """The layer that was read first of those that are ready or on their way; -1: none is."""
        return next(iter(self._ready), self._loading)

    def _turn_to(self, layer: int) -> None:
        """Forget what was read ahead; go on from this layer."""
        self._free.extend(self._ready.values())
        self._ready.clear()
        self._turn += 1
        self._next, self._loading, self._error = self._layers.index(layer), -1, None

    def _may_read(self) -> bool:
        layer = self._layers[self._next]
        held = layer in self._ready or (self._current is not None and self._current[0] == layer)
        return self._stopped or (bool(self._free) and not held and self._error is None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._may_read():
                    self._changed.wait(LOOK_SECONDS)
                if self._stopped:
                    return
                layer, slab, turn = self._layers[self._next], self._free.popleft(), self._turn
                self._next = (self._next + 1) % len(self._layers)
                self._loading = layer
            began, error = perf_counter(), None
            try:
                self._read(layer, slab.data)
                slab.arrived(self._stream)
            except BaseException as raised:  # whatever it is, the thread that waits must hear of it
                error = raised
            with self._changed:
                self.loads += perf_counter() - began
                self._loading = -1 if turn == self._turn else self._loading
                if turn != self._turn or error is not None:
                    self._free.append(slab)
                    if turn == self._turn and error is not None:
                        self._error = layer, error
                else:
                    self._ready[layer] = slab
                self._changed.notify_all()
