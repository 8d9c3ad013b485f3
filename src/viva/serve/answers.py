"""Answers in the form of OpenAI's interface, whole and as the chunks of a stream."""

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate

import tinker
from tinker_cookbook.renderers.base import Message

from viva.conversation.rendering import build_prompt
from viva.serve.bodies import ChatBody, CompletionBody, JsonObject
from viva.serve.sampling import Alternatives, Piece, SamplingJob, ScoredPrompt, ServedPolicy, Token, stops_of


def chat_messages(body: ChatBody) -> list[Message]:
    """The messages of a chat as renderers take them."""
    roles = {"developer": "system"}
    return [{"role": roles.get(each.role, each.role), "content": each.text} for each in body.messages]


async def make_job(body: ChatBody | CompletionBody, policy: ServedPolicy) -> SamplingJob:
    """The samples that a request asks for; to be awaited in the engine's thread, as it tokenizes.

    Raises:
        ValueError: If the chat format does not take the messages.
    """
    if isinstance(body, ChatBody):
        prompts = (tuple(build_prompt(policy.renderer, chat_messages(body)).to_ints()),)
        strings, ids = stops_of(policy.renderer)
        end_ids = tuple(dict.fromkeys([*ids, *policy.client.end_ids]))
        max_tokens = body.token_limit
        num_alternatives = (body.top_logprobs or 0) if body.logprobs else 0
    else:
        prompts = tuple(
            policy.text_tokens(prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        )
        strings, end_ids = list[str](), policy.client.end_ids
        max_tokens = body.max_tokens
        num_alternatives = body.logprobs or 0
    return SamplingJob(
        prompts=prompts,
        num_samples=body.n,
        params=tinker.SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k or -1,
            seed=body.seed,
            stop=[*strings, *body.stops],
        ),
        end_ids=end_ids,
        num_alternatives=num_alternatives,
        num_prompt_alternatives=body.prompt_logprobs,
    )


class PendingAnswer:
    """An answer in the making."""

    def __init__(self, body: ChatBody | CompletionBody, job: SamplingJob) -> None:
        self._body = body
        self._job = job
        self._is_chat = isinstance(body, ChatBody)
        self._num_tokens = 0
        self._offsets: dict[int, int] = {}
        """Characters of the tokens in earlier chunks, by choice."""
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head: JsonObject = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    def whole(self, pieces: Sequence[Piece], prompts: Sequence[ScoredPrompt]) -> JsonObject:
        """The answer, once all is sampled."""
        by_choice: list[list[Piece]] = [[] for _ in range(len(self._job.prompts) * self._job.num_samples)]
        for piece in pieces:
            by_choice[piece.choice].append(piece)
        choices = [self._choice(index, own) for index, own in enumerate(by_choice)]
        extras = [self._prompt_fields(prompt) for prompt in prompts]
        kind = "chat.completion" if self._is_chat else "text_completion"
        answer = self._head | {"object": kind, "choices": choices, "usage": self.usage()}
        if self._is_chat:
            return answer | extras[0]
        for index, choice in enumerate(choices):
            choice |= extras[index // self._job.num_samples]
        return answer

    def chunk(self, piece: Piece) -> JsonObject:
        """The chunk of one more token."""
        offset = self._offsets.get(piece.choice)
        fields = self._choice(piece.choice, [piece], offset or 0)
        if self._is_chat:
            message = fields.pop("message")
            fields["delta"] = message if offset is None else {"content": piece.text}
        self._offsets[piece.choice] = (offset or 0) + len(piece.token.text)
        return self._chunk([fields])

    def opening(self) -> JsonObject | None:
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

    def closing(self) -> JsonObject | None:
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

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices}

    def _choice(self, index: int, pieces: Sequence[Piece], offset: int = 0) -> JsonObject:
        text = "".join(piece.text for piece in pieces)
        tokens = [piece.token for piece in pieces]
        self._num_tokens += len(tokens)
        fields: JsonObject = {
            "index": index,
            "finish_reason": pieces[-1].finish_reason if pieces else None,
            "logprobs": None,
        }
        if isinstance(self._body, ChatBody):
            fields["message"] = {"role": "assistant", "content": text}
            if self._body.logprobs:
                fields["logprobs"] = _chat_logprobs(tokens)
        else:
            fields["text"] = text
            if self._body.logprobs is not None:
                fields["logprobs"] = _text_logprobs(tokens, offset)
        if self._body.return_token_ids:
            fields["token_ids"] = [token.id for token in tokens]
        return fields

    def _prompt_fields(self, prompt: ScoredPrompt) -> JsonObject:
        fields: JsonObject = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(prompt.tokens)
        if self._job.num_prompt_alternatives is not None:
            fields["prompt_logprobs"] = [None if row is None else _by_id(row) for row in prompt.logprobs]
        return fields


def _chat_logprobs(tokens: Sequence[Token]) -> JsonObject:
    rows = [
        _entry(token.text, token.logprob)
        | {"top_logprobs": [_entry(text, logprob) for _, text, logprob in token.alternatives]}
        for token in tokens
    ]
    return {"content": rows, "refusal": None}


def _entry(text: str, logprob: float) -> JsonObject:
    """A token of a chat's logprobs; its bytes are left out where it is only a part of a character."""
    return {
        "token": text,
        "logprob": logprob,
        "bytes": None if "\ufffd" in text else list(text.encode("utf-8", "replace")),
    }


def _text_logprobs(tokens: Sequence[Token], offset: int) -> JsonObject:
    """The older form: parallel lists; every token is among its alternatives."""
    lengths = [len(token.text) for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {text: logprob for _, text, logprob in reversed(token.alternatives)} | {token.text: token.logprob}
            for token in tokens
        ],
        "text_offset": list(accumulate(lengths[:-1], initial=offset))[: len(lengths)],
    }


def _by_id(row: Alternatives) -> JsonObject:
    return {str(token): {"logprob": logprob, "decoded_token": text} for token, text, logprob in row}


def model_entry(policy: ServedPolicy) -> JsonObject:
    """A model in the list."""
    return {
        "id": policy.name,
        "object": "model",
        "created": 0,
        "owned_by": "viva",
        "max_model_len": policy.client.context_length,
    }
