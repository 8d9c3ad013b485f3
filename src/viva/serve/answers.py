"""Answers in the form of OpenAI's interface, whole and as the chunks of a stream."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tinker_cookbook.renderers.base import Message

from viva.serve.bodies import ChatBody, CompletionBody
from viva.serve.sampling import Alternatives, Job, Piece, ScoredPrompt, ServedPolicy, Token


def chat_messages(body: ChatBody) -> list[Message]:
    """The messages of a chat as renderers take them."""
    roles = {"developer": "system"}
    return [{"role": roles.get(each.role, each.role), "content": each.text} for each in body.messages]


def chat_job(body: ChatBody, policy: ServedPolicy) -> Job:
    """The samples that a chat asks for.

    Raises:
        ValueError: If the chat format does not take the messages.
    """
    prompt = policy.chat_tokens(chat_messages(body))
    strings, ids = policy.chat_stops()
    return Job(
        prompts=(prompt,),
        num_samples=body.n,
        max_tokens=body.token_limit,
        stops=(*strings, *body.stops),
        end_ids=ids,
        num_alternatives=(body.top_logprobs or 0) if body.logprobs else 0,
        **_shared(body),
    )


def completion_job(body: CompletionBody, policy: ServedPolicy) -> Job:
    """The samples that a completion asks for."""
    return Job(
        prompts=tuple(
            policy.text_tokens(prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        ),
        num_samples=body.n,
        max_tokens=body.max_tokens,
        stops=body.stops,
        end_ids=policy.end_ids,
        num_alternatives=body.logprobs or 0,
        **_shared(body),
    )


def _shared(body: ChatBody | CompletionBody) -> dict[str, Any]:
    return {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k or -1,
        "seed": body.seed,
        "num_prompt_alternatives": body.prompt_logprobs,
    }


@dataclass(slots=True, kw_only=True)
class _Choice:
    """A sample so far."""

    texts: list[str] = field(default_factory=list[str])
    tokens: list[Token] = field(default_factory=list[Token])
    finish_reason: str | None = None
    is_begun: bool = False
    """Whether a chunk of it was made."""
    offset: int = 0
    """Characters of the tokens in earlier chunks."""


class Answer:
    """An answer in the making.

    Args:
        body: The request.
        job: What is sampled for it.
    """

    def __init__(self, body: ChatBody | CompletionBody, job: Job) -> None:
        self._body = body
        self._job = job
        self._is_chat = isinstance(body, ChatBody)
        self._choices = [_Choice() for _ in range(len(job.prompts) * job.num_samples)]
        self._num_tokens = 0
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    def whole(self, pieces: Sequence[Piece], prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
        """The answer, once all is sampled."""
        for piece in pieces:
            self._add(piece)
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        extras = [self._prompt_fields(prompt) for prompt in prompts]
        head = self._head | {"object": "chat.completion" if self._is_chat else "text_completion"}
        if self._is_chat:
            return head | {"choices": choices, "usage": self.usage()} | extras[0]
        for index, choice in enumerate(choices):
            choice |= extras[index // self._job.num_samples]
        return head | {"choices": choices, "usage": self.usage()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The chunk of one more token."""
        choice = self._choices[piece.choice]
        choice.texts, choice.tokens = [], []
        self._add(piece)
        fields = self._choice(piece.choice, choice)
        if self._is_chat:
            message = fields.pop("message")
            fields["delta"] = message if not choice.is_begun else {"content": message["content"]}
        choice.is_begun = True
        choice.offset += len(piece.token.text)
        return self._chunk([fields])

    def opening(self) -> dict[str, Any] | None:
        """A chunk about the prompts, if their tokens are asked for."""
        if not self._body.return_token_ids:
            return None
        extras = [self._prompt_fields(ScoredPrompt(tokens=prompt)) for prompt in self._job.prompts]
        if self._is_chat:
            return self._chunk([]) | extras[0]
        rows = [
            {"index": index * self._job.num_samples, "text": "", "logprobs": None, "finish_reason": None}
            | extra
            for index, extra in enumerate(extras)
        ]
        return self._chunk(rows)

    def closing(self) -> dict[str, Any] | None:
        """The chunk that counts the tokens, if it is asked for."""
        return self._chunk([]) | {"usage": self.usage()} if self._body.includes_usage else None

    def usage(self) -> dict[str, int]:
        """Counts of tokens; a prompt counts once, however many samples it has."""
        prompts = sum(len(prompt) for prompt in self._job.prompts)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompts + self._num_tokens,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices}

    def _add(self, piece: Piece) -> None:
        choice = self._choices[piece.choice]
        choice.texts.append(piece.text)
        choice.tokens.append(piece.token)
        choice.finish_reason = piece.finish_reason
        self._num_tokens += 1

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        fields: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
        if isinstance(self._body, ChatBody):
            fields["message"] = {"role": "assistant", "content": text}
            logprobs = _chat_logprobs(choice.tokens) if self._body.logprobs else None
        else:
            fields["text"] = text
            logprobs = None if self._body.logprobs is None else _text_logprobs(choice)
        fields["logprobs"] = logprobs
        if self._body.return_token_ids:
            fields["token_ids"] = [token.id for token in choice.tokens]
        return fields

    def _prompt_fields(self, prompt: ScoredPrompt) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(prompt.tokens)
        if self._job.num_prompt_alternatives is not None:
            fields["prompt_logprobs"] = [None if row is None else _by_id(row) for row in prompt.logprobs]
        return fields


def _chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    rows = [
        _entry(token.text, token.logprob)
        | {"top_logprobs": [_entry(text, logprob) for _, text, logprob in token.alternatives]}
        for token in tokens
    ]
    return {"content": rows, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """A token of a chat's logprobs; its bytes are left out where it is only a part of a character."""
    return {
        "token": text,
        "logprob": logprob,
        "bytes": None if "\ufffd" in text else list(text.encode("utf-8", "replace")),
    }


def _text_logprobs(choice: _Choice) -> dict[str, Any]:
    """The older form: parallel lists; every token is among its alternatives."""
    lengths = [len(token.text) for token in choice.tokens]
    return {
        "tokens": [token.text for token in choice.tokens],
        "token_logprobs": [token.logprob for token in choice.tokens],
        "top_logprobs": [
            {text: logprob for _, text, logprob in reversed(token.alternatives)} | {token.text: token.logprob}
            for token in choice.tokens
        ],
        "text_offset": list(accumulate(lengths[:-1], initial=choice.offset))[: len(lengths)],
    }


def _by_id(row: Alternatives) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "decoded_token": text} for token, text, logprob in row}


def model_entry(name: str, context_length: int) -> dict[str, Any]:
    """A model in the list."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "viva",
        "max_model_len": context_length,
    }
