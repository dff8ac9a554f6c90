"""A conversation with an `LLM` that holds it: what is added is loaded, encoded and computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from vlmserve.commands.offline.inputs import ChatOptions, conversation
from vlmserve.frontend.chat_messages import Message
from vlmserve.frontend.dialogue import Dialogue, Parts
from vlmserve.frontend.live import SLID, FrameClock, LiveRules
from vlmserve.frontend.requests import ChatPrompt, Slid
from vlmserve.ipc.messages import SamplingParams
from vlmserve_common.errors import EngineError

if TYPE_CHECKING:
    from vlmserve.commands.offline.llm import Completion

Load: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], list[Message]]
"""Loads and processes the media of messages: (messages, mm_processor_kwargs) -> messages that hold them."""
Answer: TypeAlias = "Callable[[Sequence[ChatPrompt], SamplingParams | None, Mapping[str, Any], Kept], list[Completion]]"
"""Answers prompts together: (prompts, sampling, options, where their KV is) -> answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Where the KV of a session's prompts is kept. name: of the session. cache_salt, slid, warnings: as of a
    `GenerateReqInput`."""

    name: str
    cache_salt: str
    slid: Slid | None = None
    warnings: tuple[str, ...] = ()


class Session(AbstractContextManager["Session"]):
    """A conversation, opened by `LLM.session`.

        with llm.session("Be brief.") as session:
            session.append("The first page:", images=["page-1.png"])
            print(session.ask("Who signed it?", max_tokens=64).text)

    options: as of `LLM.chat`, for all that is appended and asked. live: how the frames of `show` become a video.
    tokens: of the prompt as it was last computed, with the answer behind it.
    """

    def __init__(
        self,
        name: str,
        load: Load,
        answer: Answer,
        *,
        live: LiveRules,
        system: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self.tokens = 0
        self._live, self._clock = live, FrameClock(live.fps)
        self._frames: list[tuple[float, Any]] = []  # fewer than a temporal patch
        self._name, self._load, self._answer, self._options = name, load, answer, options
        system_message = [{"role": "system", "content": system}] if system is not None else []
        self._dialogue: Dialogue | None = Dialogue()
        for message in load(system_message, {}) if system_message else ():
            self._dialogue = self._dialogue.with_message(message)

    @property
    def dialogue(self) -> Dialogue:
        """Return the conversation so far. Raises EngineError for a closed session."""
        if self._dialogue is None:
            raise EngineError("this session is closed; open a new one")
        return self._dialogue

    def append(
        self,
        content: Parts,
        *,
        images: Any = (),
        videos: Any = (),
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Add to what the user says and shows: a text, or parts in OpenAI's form. Returns the figures of computing it,
        with an empty text. images, videos: as of `LLM.chat`. Raises BadRequestError, and then nothing is added."""
        return self._compute(self._with(content, images, videos, mm_processor_kwargs))

    def _compute(self, dialogue: Dialogue, slid: Slid | None = None) -> Completion:
        prompt = ChatPrompt(messages=dialogue.messages, open_ended=True, add_generation_prompt=False)
        kept = self._kept(dialogue, slid)
        [done] = self._answer([prompt], SamplingParams(max_new_tokens=0), self._own(("lora",)), kept)
        self._dialogue, self.tokens = dialogue, done.prompt_tokens
        return done

    def show(self, frames: Iterable[tuple[float, Any]]) -> Completion | None:
        """Show frames of a live video: each is a time in seconds and a picture, as of `LLM.chat`. Frames beyond the
        session's rate are left out.

        They are computed by whole temporal patches (two frames). A question also sees a frame that waits for its
        second one. Returns the figures of computing them; None if there was nothing to compute. Raises BadRequestError
        for a time that does not rise, a frame of another size, and no picture. What came before it is kept."""
        done = None
        for time, picture in frames:
            now, used = self._clock.take(time)
            self._frames += [(now, picture)] * used
            if len(self._frames) == self._live.depth:
                waiting, self._frames = self._frames, []
                done = self._compute(*self._live.windowed(self._shown(self.dialogue, waiting)))
        return done

    def append_message(self, message: Message) -> None:
        """Add a whole message, such as one of a tool. It is computed with the next question."""
        [loaded] = self._load(conversation([message]), self._options.get("mm_processor_kwargs") or {})
        self._dialogue = self.dialogue.with_message(loaded)

    def ask(
        self,
        question: Parts = (),
        sampling: SamplingParams | None = None,
        *,
        images: Any = (),
        videos: Any = (),
        keep: bool = True,
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """Answer a question about the conversation. keep: question and answer stay in it. Without a question, what was
        appended is the question. Raises BadRequestError, and then nothing is added."""
        dialogue = self._with(question, images, videos, options.get("mm_processor_kwargs"), asks=True)
        [done] = self._answers([dialogue], sampling, options)
        if keep:
            self._frames = []
            self._dialogue = dialogue.with_message({"role": "assistant", "content": done.text})
            self.tokens = done.prompt_tokens + len(done.token_ids)
        return done

    def ask_together(
        self, questions: Sequence[Parts], sampling: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> list[Completion]:
        """Answer several questions, computed together, of which none stays in the conversation."""
        knobs = options.get("mm_processor_kwargs")
        asked = [self._with(one, (), (), knobs, asks=True) for one in questions]
        return self._answers(asked, sampling, options)

    def close(self) -> None:
        """Forget the conversation."""
        self._dialogue = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own(self, names: Sequence[str] = ()) -> dict[str, Any]:
        return {name: value for name, value in self._options.items() if not names or name in names}

    def _answers(
        self, dialogues: Sequence[Dialogue], sampling: SamplingParams | None, options: Mapping[str, Any]
    ) -> list[Completion]:
        prompts = [ChatPrompt(messages=dialogue.messages) for dialogue in dialogues]
        return self._answer(prompts, sampling, {**self._own(), **options}, self._kept(self.dialogue))

    def _kept(self, dialogue: Dialogue, slid: Slid | None = None) -> Kept:
        warnings = (SLID,) if dialogue.window else ()
        return Kept(name=self._name, cache_salt=dialogue.salt("") or "", slid=slid, warnings=warnings)

    def _shown(self, dialogue: Dialogue, frames: Sequence[tuple[float, Any]]) -> Dialogue:
        """Return a conversation with one more temporal patch of live video."""
        knobs = self._options.get("mm_processor_kwargs") or {}
        part = self._live.part([picture for _, picture in frames], sized=bool(knobs))
        [message] = self._load([{"role": "user", "content": [part]}], knobs)
        video = message["content"][0]["video"]
        return self._live.shown(dialogue, self._live.patch(video, [time for time, _ in frames]))

    def _with(
        self, content: Parts, images: Any, videos: Any, kwargs: Mapping[str, Any] | None, *, asks: bool = False
    ) -> Dialogue:
        """Return the conversation with more of what the user says, its media loaded. asks: it is a question, which
        sees all frames."""
        given = content if isinstance(content, str) else [{"role": "user", "content": list(content)}]
        dialogue = self.dialogue
        if asks and self._frames:
            dialogue = self._shown(dialogue, self._frames)
        if not content and not images and not videos:
            return dialogue
        knobs = kwargs or self._options.get("mm_processor_kwargs") or {}
        [message] = self._load(conversation(given, images, videos), knobs)
        return dialogue.with_content(message["content"])
