"""The HDF5 bytes that make a segment a file any HDF5 tool opens. libhdf5 is asked once a shape, in memory.

user block (ours) | superblock, one group, one dataset header | kv: uint8 [layers, extent], contiguous
"""

import io
from functools import lru_cache
from typing import Any

from qkv.errors import BackendUnavailable

PAGE = 4096
DATASET = "kv"


@lru_cache(maxsize=64)
def metadata(user_bytes: int, layers: int, extent: int) -> bytes:
    """What stands between the user block and the dataset's first byte, which is at a multiple of 4,096.

    user_bytes: of the user block, a power of two from 4,096 on. The same bytes for the same numbers, in every process.
    Raises BackendUnavailable.
    """
    try:
        import h5py
    except ImportError as error:
        raise BackendUnavailable("store", f"h5py cannot be imported ({error}); pip install 'qkv[store]'") from None
    file = _Sparse()
    # v110: a fixed superblock version, whatever libhdf5 is installed
    sizes: dict[str, Any] = {"userblock_size": user_bytes, "alignment_threshold": 2 * PAGE, "alignment_interval": PAGE}
    with h5py.File(file, "w", libver=("v110", "v110"), **sizes) as made:
        options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        options.set_layout(h5py.h5d.CONTIGUOUS)
        options.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        options.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        options.set_obj_track_times(False)
        space = h5py.h5s.create_simple((layers, extent))
        kv = h5py.h5d.create(made.id, DATASET.encode(), h5py.h5t.STD_U8LE, space, dcpl=options)
        offset: int = kv.get_offset()
        kv.close()
    assert offset % PAGE == 0
    assert len(file.written) <= offset, "libhdf5 wrote behind the dataset's start"
    return bytes(file.written[user_bytes:]) + bytes(offset - max(user_bytes, len(file.written)))


class _Sparse(io.RawIOBase):
    """A file of any size that holds only what is written near its start."""

    def __init__(self) -> None:
        self.written, self.size, self.at = bytearray(), 0, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def truncate(self, size: int | None = None) -> int:
        self.size = self.at if size is None else size
        return self.size

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self.at))
        there = bytes(self.written[self.at : self.at + count])
        buffer[:count] = there + bytes(count - len(there))
        self.at += count
        return count

    def write(self, data: Any) -> int:
        end = self.at + len(data)
        self.written.extend(bytes(max(0, end - len(self.written))))
        self.written[self.at : end] = bytes(data)
        self.at, self.size = end, max(self.size, end)
        return len(data)
