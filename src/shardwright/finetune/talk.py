"""A fine-tuned model in the terminal: it continues a text, or answers in a chat. One process, one device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.errors import InputError
from shardwright.finetune.generate import Wanted, generate
from shardwright.finetune.tuned import Tuned, check_trusted, load_whole
from shardwright.hf import library

Message = dict[str, str]


class Speaker:
    """A model of ``find_tuned`` with its adapter merged, whole in memory, on the accelerator where there is
    one."""

    def __init__(self, tuned: Tuned) -> None:
        check_trusted(tuned)
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = found or torch.device("cpu")
        self.tokenizer = library.tokenizer(tuned.base)
        self.model = load_whole(tuned, self.device)

    def write(self, tokens: torch.Tensor, wanted: Wanted, streamer: Any = None) -> str:
        """What follows ``tokens``, int64 (1, n); shown while it is written, if there is a ``streamer``.

        Raises: InputError where these are more than the model has positions for.
        """
        room = getattr(self.model.config, "max_position_embeddings", None)
        if room is not None and tokens.shape[1] >= room:
            raise InputError(
                f"{tokens.shape[1]} tokens, and the model has {room} positions: begin with fewer"
            )
        torch.manual_seed(wanted.seed)
        written = generate(self.model, self.tokenizer, tokens.to(self.device), wanted, streamer=streamer)
        return self.tokenizer.decode(written, skip_special_tokens=True)

    def chat(
        self, wanted: Wanted, system: str, ask: Callable[[], str | None], show: Callable[[str], None]
    ) -> None:
        """Answer what ``ask`` returns until it is None; ``/new`` begins a new conversation. Answers are
        printed as they are written, by the tokenizer's chat template, as in training; ``show`` prints a line.

        Raises: InputError where the tokenizer has no chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                "the base's tokenizer has no chat template: put one beside it (chat_template.jinja), or "
                "let the model continue a text with shardwright sample --prompt TEXT"
            )
        begin: list[Message] = [{"role": "system", "content": system}] if system else []
        messages = list(begin)
        while (said := ask()) is not None:
            if said.strip() == "/new":
                messages = list(begin)
                continue
            if not said.strip():
                continue
            messages.append({"role": "user", "content": said})
            try:
                answer = self.write(self._asked(messages), wanted, library.streamer(self.tokenizer))
            except InputError as error:
                messages.pop()
                show(f"{error}, or with /new")
                continue
            except KeyboardInterrupt:
                messages.pop()
                show("")
                continue
            messages.append({"role": "assistant", "content": answer})

    def _asked(self, messages: Sequence[Message]) -> torch.Tensor:
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
