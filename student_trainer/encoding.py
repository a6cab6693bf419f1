"""One row as token ids and labels.

Three formats, named as in TRL, recognised row by row in this order:

    {"prompt": ..., "completion": ...}   two strings, or two lists of messages
    {"messages": [...]}                  a chat; every assistant turn is an answer
    {"text": ...}                        plain text; every token is supervised

Labels are not shifted: `labels[i]` is `input_ids[i]` where token i belongs to an answer and
IGNORE_INDEX elsewhere, so the row of logits at i is about `labels[i + 1]`. They are built
from positions, never by matching ids: a pad id equal to the EOS id changes nothing, and an
EOS id in a prompt stays an ordinary prompt token.

One EOS closes every answer and is supervised. Strings get theirs here, unless they end with
it already; in a chat the template writes it after each assistant turn, and the last turn
gets one if the template does not. What follows the last answer of a chat is left out.
BOS is put first if the tokenizer would put it, and never twice.

Depends on: transformers. Knows nothing of files, batches or teachers.
"""

import re
from typing import cast

import jinja2
from transformers import BatchEncoding, PreTrainedTokenizerBase

from distill_wire.types import IGNORE_INDEX
from student_trainer.rows import FORMATS, Row

Message = dict[str, object]
Span = tuple[int, int]


class RowEncoder:
    """Turns one row of any format into ids and labels, before truncation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look up the EOS and what the tokenizer puts before a text."""
        if not isinstance(tokenizer.eos_token_id, int):
            raise ValueError("the tokenizer has no EOS token to end an answer; set its eos_token")
        self.tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        # Asked of the tokenizer itself: `bos_token_id` may be set and yet never written.
        bare, full = self.tokenize("a"), list(tokenizer("a")["input_ids"])
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        self.bos_ids: list[int] = full[: min(starts, default=0)]

    def encode(self, row: Row, *, sample_id: str) -> tuple[list[int], list[int]]:
        """Return equally long ids and labels; the labels are not shifted.

        Raises:
            ValueError: the row has no known format, an empty input, or does not fit the
                tokenizer's chat template; the message names the sample.
        """
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            refuse_empty(prompt, sample_id, "prompt")
            head = self.open_with_bos(prompt)
            answer = self.close_with_eos(self.tokenize(completion))
            return head + answer, [IGNORE_INDEX] * len(head) + answer
        if prompt is not None and completion is not None:
            asked = read_messages(prompt, sample_id, "prompt")
            answered = read_messages(completion, sample_id, "completion")
            return self.encode_chat(asked + answered, len(asked), sample_id)
        messages, text = row.get("messages"), row.get("text")
        if messages is not None:
            return self.encode_chat(read_messages(messages, sample_id, "messages"), 0, sample_id)
        if isinstance(text, str):
            refuse_empty(text, sample_id, "text")
            ids = self.close_with_eos(self.open_with_bos(text))
            return ids, list(ids)
        found = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
        raise ValueError(f"sample {sample_id} has the fields {found}; expected {FORMATS}")

    def encode_chat(
        self, messages: list[Message], num_given: int, sample_id: str
    ) -> tuple[list[int], list[int]]:
        """Label the assistant turns after the first `num_given` messages."""
        roles = [message["role"] for message in messages]
        turns = [i for i in range(num_given, len(roles)) if roles[i] == "assistant"]
        if not turns:
            raise ValueError(f"sample {sample_id} has no assistant turn to learn from")
        if not self.tokenizer.chat_template:
            raise ValueError(f"sample {sample_id} is a chat; the tokenizer has no chat_template")
        try:
            if re.search(r"\{%-?\s*generation\b", self.tokenizer.get_chat_template()):
                ids, spans = self.find_marked_turns(messages, len(turns), sample_id)
            else:
                ids, spans = self.find_turns(messages, turns, sample_id)
        except jinja2.TemplateError as exc:
            raise ValueError(f"sample {sample_id}: the chat template refused it: {exc}") from exc

        labels = [IGNORE_INDEX] * len(ids)
        for start, end in spans:
            # A turn ends with its EOS. ChatML writes a newline after it that no model is
            # asked to produce; a {% generation %} block may stop right before it.
            turn = ids[start:end]
            num_after = turn[::-1].index(self.eos_id) if self.eos_id in turn else 0
            if not str(self.tokenizer.decode(turn[len(turn) - num_after :])).strip():
                end -= num_after
            if ids[end - 1] != self.eos_id and ids[end : end + 1] == [self.eos_id]:
                end += 1
            labels[start:end] = ids[start:end]
        ids, labels = ids[:end], labels[:end]
        if ids[-1] != self.eos_id:
            ids, labels = [*ids, self.eos_id], [*labels, self.eos_id]
        return ids, labels

    def find_marked_turns(
        self, messages: list[Message], num_turns: int, sample_id: str
    ) -> tuple[list[int], list[Span]]:
        """Take the answers from the template's own {% generation %} marks."""
        chat = cast(list[dict[str, str]], messages)
        marked = self.tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True)
        assert isinstance(marked, BatchEncoding), "return_dict is the default"
        mask = [0, *cast(list[int], marked["assistant_masks"]), 0]
        edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        if len(spans) < num_turns:
            found = f"{num_turns} assistant turns, but its template marks {len(spans)}"
            raise ValueError(f"sample {sample_id} has {found} with {{% generation %}}")
        return list(cast(list[int], marked["input_ids"])), spans[-num_turns:]

    def find_turns(
        self, messages: list[Message], turns: list[int], sample_id: str
    ) -> tuple[list[int], list[Span]]:
        """Find the answers by tokenising the chat up to each of them.

        What comes before an answer is tokenised as at generation time, so this refuses a
        template that rewrites earlier turns or a tokenizer that merges over the boundary.
        """
        ids = self.render(messages)
        spans: list[Span] = []
        for turn in turns:
            if turn == 0:
                raise ValueError(f"sample {sample_id} opens with an assistant turn: no prompt")
            before = self.render(messages[:turn], add_generation_prompt=True)
            through = self.render(messages[: turn + 1])
            if ids[: len(before)] != before or ids[: len(through)] != through:
                raise ValueError(
                    f"sample {sample_id}, message {turn}: the chat up to it is not a prefix of the "
                    "whole chat, so its tokens cannot be told apart; use a template with "
                    "{% generation %} marks, or prompt and completion as strings"
                )
            spans.append((len(before), len(through)))
        return ids, spans

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> list[int]:
        """Return the ids of a chat as the template writes it."""
        chat = cast(list[dict[str, str]], messages)
        ids = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        return list(cast(list[int], ids))

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text alone, nothing put around it."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def open_with_bos(self, text: str) -> list[int]:
        """Return the ids of a text with what the tokenizer puts before a text, once."""
        ids = self.tokenize(text)
        return ids if ids[: len(self.bos_ids)] == self.bos_ids else self.bos_ids + ids

    def close_with_eos(self, ids: list[int]) -> list[int]:
        """Return the ids with one EOS at the end, unless they have it."""
        return ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id]


def refuse_empty(value: object, sample_id: str, field: str) -> None:
    """Raise ValueError for an empty input."""
    if not value:
        raise ValueError(f"sample {sample_id} has an empty {field!r}; fill it or remove the row")


def read_messages(value: object, sample_id: str, field: str) -> list[Message]:
    """Check that a field is a list of messages; drop the nulls that Arrow fills in."""
    refuse_empty(value, sample_id, field)
    if not isinstance(value, list) or not all(isinstance(m, dict) and "role" in m for m in value):
        raise ValueError(
            f"sample {sample_id}: {field!r} is a {type(value).__name__}; expected a list of "
            '{"role": ..., "content": ...}, or strings in both prompt and completion'
        )
    return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]
