"""qkv: a KV-cache memory system for long-context language models.

Low-bit blocks that attention reads where they lie. Start at `KVManager`; transformers users at
`qkv.backends.transformers`.
"""

from qkv.errors import QkvError as QkvError
from qkv.formats import get_format as get_format
from qkv.formats import list_formats as list_formats
from qkv.manager import KVManager as KVManager
from qkv.manager import Memory as Memory
from qkv.sequence import Sequence as Sequence
from qkv.spec import AttendOptions as AttendOptions
from qkv.spec import Format as Format
from qkv.spec import RecordLayout as RecordLayout

__version__ = "0.1.0"
__all__ = [
    "AttendOptions",
    "Format",
    "KVManager",
    "Memory",
    "QkvError",
    "RecordLayout",
    "Sequence",
    "get_format",
    "list_formats",
]
