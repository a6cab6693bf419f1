"""Real but tiny tokenizers: one word is one token, and the ids are known by heart.

Depends on: tokenizers, transformers. No files, no hub.
"""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

END = "<end>"
START = "<start>"
WORDS = (START, END, "<unk>", "user", "assistant", "system", "\n")

CHATML = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
"""Every turn `<start>role\\ncontent<end>\\n`, as in ChatML."""

CHATML_WITH_MARKS = (
    "{% for m in messages %}<start>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
"""The same text; the marks stop right before the turn's end."""

FORGETFUL = (
    "{% for m in messages %}<start>{{ m['role'] }}\n"
    "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
"""Blanks earlier answers, as templates of reasoning models do with their thoughts."""


def make_word_tokenizer(
    *, is_pad_eos: bool = True, writes_bos: bool = False, chat_template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of lower-case letters `a` to `z`, roles and markers.

    Args:
        is_pad_eos: the pad token is the EOS, as in many released models.
        writes_bos: it puts `<start>` before a text, as Llama's does.
        chat_template: for messages; None leaves it out.
    """
    letters = [chr(ord("a") + i) for i in range(26)]
    vocabulary = {word: index for index, word in enumerate([*WORDS, *letters, "<pad>"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    if writes_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, vocabulary[START])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=START,
        eos_token=END,
        unk_token="<unk>",
        pad_token=END if is_pad_eos else "<pad>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer
