"""Questions about a long document: the document is read once into a qkv cache, each question forks it.

Knows prompts and decoding, not records. The document's own pass attends to exact K and V; questions and answers attend
to what was kept.
"""

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qkv.backends.identity import namespace_of
from qkv.backends.transformers import QKVCache, cache_argument, enable
from qkv.errors import InputError, LayerLost, StoreFull
from qkv.spec import Format

if TYPE_CHECKING:
    from qkv.offload.disk import DiskStore

DOCUMENT_PROMPT = "Read the following document and answer the question about it.\n\n{document}\n\n"
QUESTION_PROMPT = "Answer with a short phrase copied from the document. Question: {question}"
_MARK = "\u241fquestion\u241f"


@dataclass(frozen=True)
class Answer:
    """One question's row of `qkv qa --json` (design.md section 10).

    kv_bytes are those of the question's own sequence: records, sink and tail. The copy of sink and tail that the
    document keeps for the next question is not in it. kv_bytes_exact: the same tokens in the model's dtype.
    """

    question: str
    answer: str
    format: str
    model: str
    prompt_tokens: int
    kv_bytes: int
    kv_bytes_exact: int
    bits_per_value: float
    ttft_s: float
    decode_tokens_per_s: float
    prefix_tokens_reused: int


class DocumentQA:
    """A model, a document in one format's cache, and `ask`. Greedy decoding, batch of one.

    on_progress(done, total) is called after each layer of the document's pass.
    store: the document's cache is taken from there if it is there, and kept there if not. `notes` says what went wrong
    with it: an answer never fails for the store's sake.
    Raises InputError if the document does not fit the model's context; FormatError, UnsupportedModel.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        format: Format,
        max_new_tokens: int = 48,
        store: "DiskStore | None" = None,
    ) -> None:
        if max_new_tokens < 1:
            raise InputError(f"max-new-tokens: got {max_new_tokens}, wanted at least 1")
        enable(model)
        self.model, self.tokenizer, self.name, self.format = model, tokenizer, name, format
        self.max_new_tokens, self.store = max_new_tokens, store
        self.notes: list[str] = []
        self._ids_read = torch.zeros(1, 0, dtype=torch.int64)
        self._restored = 0  # tokens of the document that came from the store
        self._asked = False
        self._argument = cache_argument(model)
        self._suffix = ""
        self._prefix_seconds = 0.0
        self.prefix_tokens = 0
        self.cache: QKVCache | None = None

    def read(self, document: str, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Prefill the document: time and tokens are kept for the first answer's time to first token."""
        if not document.strip():
            raise InputError("document: got no text, wanted at least one word")
        before, self._suffix = self._prompt(document)
        self._ids_read = self._ids(before)
        self.prefix_tokens = self._ids_read.shape[1]
        self._hold_to_context(self.prefix_tokens + self.max_new_tokens, "document and answer")
        self.cache = QKVCache(self.model.config, self.format)
        self._restored, self._asked = 0, False
        if self.store is not None:
            self.cache.attach(
                self.store, namespace_of(self.model, self.cache.manager, self.tokenizer), self.model.device
            )
        began = time.perf_counter()
        if self.store is not None:
            self._restored = self.cache.restore(self._ids_read, left=0, wait=False)
        with _layer_progress(self.model, on_progress):
            self._compute()
        self._prefix_seconds = time.perf_counter() - began
        self._keep()

    def _compute(self) -> None:
        """The document's tokens that the store did not have."""
        assert self.cache is not None
        try:
            if self._restored < self.prefix_tokens:
                self._forward(self._ids_read[:, self._restored :], self.cache)
        except LayerLost as error:
            self._lose(error)
            self._forward(self._ids_read, self.cache)

    def _lose(self, error: LayerLost) -> None:
        """A stored layer cannot be had: the document is to be computed, from its first token on."""
        assert self.cache is not None
        self.notes.append(f"the stored document is of no use and is read again: {error}")
        self.cache.reset()
        self._restored = 0

    def _keep(self) -> None:
        assert self.cache is not None
        if self.store is None or self.store.readonly or self._restored == self.prefix_tokens:
            return
        try:
            self.cache.persist(self._ids_read)
        except (StoreFull, InputError, LayerLost, OSError) as error:
            self.notes.append(f"the document was not stored: {error}")

    def check(self, question: str) -> int:
        """Tokens of document and question. Raises InputError for an empty question or one that does not fit."""
        if not question.strip():
            raise InputError("question: got no text, wanted at least one word")
        tokens = self.prefix_tokens + self._question_ids(question).shape[1]
        self._hold_to_context(tokens + self.max_new_tokens, "document, question and answer")
        return tokens

    def ask(self, question: str, on_text: Callable[[str], None] = lambda text: None, *, last: bool = False) -> Answer:
        """Answer one question. `last` uses the document's cache itself, which cannot be asked again."""
        assert self.cache is not None, "read a document first"
        prompt_tokens = self.check(question)
        ids = self._question_ids(question)
        began = time.perf_counter()
        try:
            cache = self.cache if last else self.cache.fork()
            token = int(self._forward(ids, cache)[0, -1].argmax())
        except LayerLost as error:
            self._lose(error)
            self._compute()
            self._keep()
            cache = self.cache if last else self.cache.fork()
            token = int(self._forward(ids, cache)[0, -1].argmax())
        first = time.perf_counter()
        made = self._decode(token, cache, on_text)
        seconds = time.perf_counter() - first
        held = cache.held().total
        exact = self._exact_bytes_per_token() * cache.get_seq_length()
        answer = Answer(
            question=question,
            answer=self.tokenizer.decode(made, skip_special_tokens=True).strip(),
            format=self.format.id,
            model=self.name,
            prompt_tokens=prompt_tokens,
            kv_bytes=held,
            kv_bytes_exact=exact,
            bits_per_value=held / exact * self.model.dtype.itemsize * 8,
            ttft_s=first - began + (0.0 if self._asked else self._prefix_seconds),
            decode_tokens_per_s=(len(made) - 1) / seconds if len(made) > 1 else 0.0,
            prefix_tokens_reused=self.prefix_tokens if self._asked else self._restored,
        )
        self._asked = True
        if not last:
            cache.reset()
        return answer

    def score(self, question: str, answer: str) -> torch.Tensor:
        """Log-probabilities float32 [Q, vocabulary] of each answer token, teacher-forced over the stored document."""
        assert self.cache is not None, "read a document first"
        asked, told = self._question_ids(question), self._ids(answer)
        cache = self.cache.fork()
        logits = self._forward(torch.cat([asked, told], dim=1), cache, keep=told.shape[1] + 1)
        cache.reset()
        return logits[0, :-1].float().log_softmax(-1)

    def _decode(self, token: int, cache: QKVCache, on_text: Callable[[str], None]) -> list[int]:
        ends = self._end_tokens()
        made: list[int] = []
        shown = ""
        while token not in ends and len(made) < self.max_new_tokens:
            made.append(token)
            text = self.tokenizer.decode(made, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # half a character: wait for the rest
                on_text(text[len(shown) :])
                shown = text
            token = int(self._forward(torch.tensor([[token]], device=self.model.device), cache)[0, -1].argmax())
        return made

    def _forward(self, ids: torch.Tensor, cache: QKVCache, keep: int = 1) -> torch.Tensor:
        with torch.inference_mode():
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=keep, **{self._argument: cache})
        logits: torch.Tensor = out.logits
        if not bool(torch.isfinite(logits[:, -1]).all()):
            raise InputError("the model produced NaN or infinite logits; try --dtype float32 or another format")
        return logits

    def _prompt(self, document: str) -> tuple[str, str]:
        """The chat as text, cut at the question: document part, and what follows the question."""
        content = DOCUMENT_PROMPT.format(document=document) + QUESTION_PROMPT.format(question=_MARK)
        if getattr(self.tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": content}]
            content = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        else:
            content += "\nAnswer:"
        before, _, after = content.rpartition(QUESTION_PROMPT.format(question=_MARK))
        return before, after

    def _question_ids(self, question: str) -> torch.Tensor:
        return self._ids(QUESTION_PROMPT.format(question=question) + self._suffix)

    def _ids(self, text: str) -> torch.Tensor:
        ids: torch.Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
        return ids.to(self.model.device)

    def _end_tokens(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        listed = ends if isinstance(ends, list) else [ends]
        return {int(end) for end in [*listed, self.tokenizer.eos_token_id] if end is not None}

    def _hold_to_context(self, tokens: int, what: str) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and tokens > limit:
            raise InputError(
                f"{what}: got {tokens} tokens ({self.max_new_tokens} of them for the answer), wanted at most {limit}, "
                f"the context of {self.name}; shorten the text, lower --max-new-tokens or choose another --model"
            )

    def _exact_bytes_per_token(self) -> int:
        assert self.cache is not None
        layout = self.cache.manager.layout(0)
        assert layout is not None
        return layout.layer.token_bytes * len(self.cache.layers)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(exact || other) in nats a token of two `score` results [Q, vocabulary]."""
    return float((exact.double().exp() * (exact.double() - other.double())).sum(-1).mean())


@contextmanager
def _layer_progress(model: Any, on_progress: Callable[[int, int], None]) -> Any:
    """Calls on_progress(layers done, layers) during one forward pass."""
    layers = model.get_decoder().layers
    hooks = [
        layer.register_forward_hook(lambda *_, done=index + 1: on_progress(done, len(layers)))
        for index, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
