"""`qkv bench offload`: what a stored prefix saves, and what streaming records costs. Three parts, see ttft.py,
streamed.py and simulated.py.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.bench import checks
from qkv.bench.rows import Row
from qkv.errors import InputError


@dataclass(frozen=True)
class OffloadOptions:
    """lengths: of the stored prefix; question: tokens behind it; formats: the first one is compared with the others.

    share: of the records' bytes that may be resident in the second part. folder: on the disk to measure. threads: as
    for the other suites. simulated: the third part too.
    """

    name: str
    lengths: tuple[int, ...] = (2048, 7168)
    question: int = 32
    formats: tuple[str, ...] = ("kivi2", "kivi4", "exact")
    share: float = 0.25
    rounds: int = 7
    steps: int = 24
    threads: int | None = None
    folder: str = "."
    simulated: bool = True

    def check(self) -> None:
        """Raises InputError, FormatError."""
        checks.formats(self.formats)
        checks.each_at_least("length", self.lengths, 512)
        checks.at_least("question", self.question, 1)
        checks.at_least("rounds", self.rounds, 3)
        checks.at_least("steps", self.steps, 3)
        checks.thread_count(self.threads)
        if not 0 < self.share < 1:
            raise InputError(f"share: got {self.share}, wanted a part of the records, such as 0.25")
        if not Path(self.folder).is_dir():
            raise InputError(f"folder: got {self.folder!r}, wanted a folder on the disk to measure")


def run(model: Any, tokenizer: Any, options: OffloadOptions, say: Any) -> list[Row]:
    """All rows. Writes to a folder of its own in `options.folder`, and removes it."""
    from qkv.backends.transformers import enable
    from qkv.bench import simulated, streamed, ttft

    options.check()
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(options.lengths) + max(options.question, streamed.SAME_TOKENS, options.steps + 3)
    if limit is not None and longest > limit:
        raise InputError(
            f"length: got {max(options.lengths)} and {longest - max(options.lengths)} tokens behind it, wanted at most "
            f"{limit} in all, the context of {options.name}"
        )
    enable(model)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="qkv-bench-", dir=options.folder) as folder,
        checks.threads(options.threads),
    ):
        for length in options.lengths:
            rows += ttft.run(model, tokenizer, options, length, folder, say)
            rows += streamed.run(model, tokenizer, options, length, folder, say)
    if options.simulated:
        say("  simulated devices and a 70B-class model")
        rows += simulated.run()
    return rows
