"""One question of the exam: the pictures or the clip, the words, and the judge of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from assets.recipe.exam.clips import Clip
from assets.recipe.exam.judges import Judge
from assets.recipe.exam.scenes import Picture, Scene

Message: TypeAlias = dict[str, Any]  # as the chat completions API takes it


@dataclass(frozen=True)
class Question:
    """A question about `media`, of which `about` is the index of the one that decides the answer.

    `earlier` are the turns before it: what the user asked, and what the assistant rightly said.
    """

    kind: str
    media: tuple[Picture | Clip, ...]
    text: str
    judge: Judge
    earlier: tuple[tuple[str, str], ...] = ()
    about: int = 0

    @property
    def scene(self) -> Scene:
        """The decisive scene, or a clip's scene at first."""
        return self.media[self.about].scene

    def messages(self) -> list[Message]:
        """The conversation as the chat completions API takes it: media as `data:` URLs before the first words."""
        said = [*(text for turn in self.earlier for text in turn), self.text]
        media = [medium.part for medium in self.media]
        first: Message = {"role": "user", "content": [*media, {"type": "text", "text": said[0]}]}
        return [first, *({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said) if n)]
