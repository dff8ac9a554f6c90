"""The exam's clips: they show what they are said to show, and judges tell right answers from wrong ones."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator

import av
import numpy as np
import pytest
from numpy.random import default_rng

from assets.recipe.exam import v4
from assets.recipe.exam.clip_judges import Direction, Instant, LaterColour, Mover, Nothing, Turning
from assets.recipe.exam.clip_reading import seconds_in
from assets.recipe.exam.clips import (
    WAYS,
    Change,
    Clip,
    Codec,
    Happening,
    Move,
    Play,
    draw_frames,
    encode,
    film,
    make_play,
)
from assets.recipe.exam.grounds import LEAST_CONTRAST
from assets.recipe.exam.items import Message
from assets.recipe.exam.judges import Judge
from assets.recipe.exam.questions import make_questions
from assets.recipe.exam.report import Outcome, Report, examine

_HAPPENINGS: tuple[Happening, ...] = ("move", "change", "nothing")


def _plays(count: int, happening: Happening | None = None) -> Iterator[Play]:
    for seed in range(count):
        yield make_play(default_rng([8, seed]), happening or _HAPPENINGS[seed % 3])


def _decoded(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_plays_are_within_the_world() -> None:
    plays = list(_plays(150))
    for play in plays:
        first = play.first
        assert 112 <= first.short_side <= max(first.width, first.height) <= min(256, 2 * first.short_side)
        assert first.width % 2 == first.height % 2 == 0
        assert 2 <= play.seconds <= 6
        assert 8 <= play.rate <= 30
        assert len({thing.colour for thing in first.things}) == len({thing.shape for thing in first.things})
        assert len({thing.shape for thing in first.things}) == len(first.things), "no two alike"
        for number in range(play.frames):
            actor = play.actor_at(number)
            for thing in (actor, *first.things[1:]):
                left, top, right, bottom = thing.box
                assert min(left, top) >= 0.99
                assert right <= first.width - 0.99
                assert bottom <= first.height - 0.99
                for side in (right - left, bottom - top):
                    assert 0.15 * first.short_side - 1e-6 <= side <= 0.4 * first.short_side + 1e-6
                assert first.ground.contrast(thing.rgb) > LEAST_CONTRAST
            for one, other in itertools.combinations((actor, *first.things[1:]), 2):
                assert any(one.box[k + 2] < other.box[k] or other.box[k + 2] < one.box[k] for k in (0, 1)), "apart"
    assert {len(play.first.things) for play in plays} == {1, 2, 3}
    assert {play.rate for play in plays} == {8, 10, 12, 15, 24, 25, 30}


def test_what_moves_does_so_steadily_one_way() -> None:
    ways = Counter[str]()
    for play in _plays(60, "move"):
        assert isinstance(play.event, Move)
        ways[play.event.way] += 1
        axis, sign = {"left": (0, -1), "right": (0, 1), "up": (1, -1), "down": (1, 1)}[play.event.way]
        path = np.array([play.actor_at(number).centre for number in range(play.frames)])
        steps = np.diff(path, axis=0)
        assert np.ptp(path[:, 1 - axis]) < 1e-9, "along one axis"
        assert (sign * steps[:, axis] > 0).all()
        assert np.ptp(steps[:, axis]) < 1e-6, "at one speed"
        box, side = play.actor.box, (play.first.width, play.first.height)[axis]
        room = side - (box[axis + 2] - box[axis])
        assert abs(path[-1, axis] - path[0, axis]) >= 0.35 * room - 1e-6
        assert len({play.actor_at(number).rgb for number in range(play.frames)}) == 1
    assert ways.keys() == set(WAYS)


def test_what_changes_does_so_once_in_the_middle_part() -> None:
    for play in _plays(60, "change"):
        event = play.event
        assert isinstance(event, Change)
        assert 0.7 - 1e-9 <= event.seconds <= play.seconds - 0.7 + 1e-9
        for number in range(play.frames):
            actor = play.actor_at(number)
            later = number / play.rate >= event.seconds - 1e-9
            assert (actor.colour, actor.rgb) == (
                (event.colour, event.rgb) if later else (play.actor.colour, play.actor.rgb)
            )
            assert actor.box == play.actor.box
        assert event.colour not in {thing.colour for thing in play.first.things}


def test_where_nothing_happens_all_frames_are_alike() -> None:
    for play in _plays(3, "nothing"):
        frames = list(draw_frames(play))
        assert play.event is None
        assert all((frame == frames[0]).all() for frame in frames)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_files_hold_the_frames(codec: Codec) -> None:
    for play in _plays(6):
        data = encode(play, codec)
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            assert (stream.average_rate, stream.frames) == (play.rate, play.frames)
            assert "mp4" in container.format.name
        decoded = _decoded(data)
        assert len(decoded) == play.frames
        for number in (0, play.frames // 2, play.frames - 1):
            drawn = next(itertools.islice(draw_frames(play), number, None))
            assert decoded[number].shape == drawn.shape == (play.first.height, play.first.width, 3)
            assert np.abs(decoded[number].astype(int) - drawn).mean() < 12
            x, y = (int(side) for side in play.actor_at(number).centre)
            assert np.linalg.norm(decoded[number][y, x] - np.array(play.actor_at(number).rgb)) < 60, (
                "the actor's colour"
            )


def test_a_clip_is_sent_as_a_video() -> None:
    clip = film(next(_plays(1)))
    assert isinstance(clip, Clip)
    assert clip.part["type"] == "video_url"
    head, data = clip.part["video_url"]["url"].split(",")
    assert head == "data:video/mp4;base64"
    assert base64.b64decode(data) == clip.data


def test_questions_are_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4, "film", lambda play: Clip(play, b""))
    questions = list(make_questions("v4", 100, 2))
    assert set(Counter(question.kind for question in questions).values()) == {20}
    assert len({question.text for question in questions}) > 50
    still = 0
    for question in questions:
        clip = question.media[0]
        assert isinstance(clip, Clip)
        still += clip.play.event is None
        assert question.judge.accepts(question.judge.right), question
        assert not question.judge.accepts(""), question
        assert "{" not in question.text
        assert "  " not in question.text
        actor, event, judge = clip.play.actor, clip.play.event, question.judge
        match question.kind:
            case "direction":
                assert isinstance(event, Move)
                assert judge == Direction(event.way)
            case "mover":
                assert judge == (Mover(actor.name) if isinstance(event, Move) else Nothing())
            case "change" if isinstance(event, Change):
                of_colour = "colo" in question.text.lower()
                later = LaterColour(actor.colour, event.colour)
                assert judge == (later if of_colour else Turning(actor.shape, actor.colour, event.colour))
            case "change":
                assert judge == Nothing()
            case "when":
                assert isinstance(event, Change)
                assert judge == Instant(event.seconds)
                assert clip.play.seconds >= 4
            case "clip-yes-no":
                text = question.text.lower()
                if any(way in text for way in WAYS):
                    assert isinstance(event, Move)
                    yes = event.way in text
                else:
                    yes = isinstance(event, Change if "chang" in text else Move)
                assert judge.accepts("Yes.") is yes
                assert judge.accepts("No.") is not yes
    assert 4 <= still <= 18, "a tenth of all"


def test_yes_and_no_are_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4, "film", lambda play: Clip(play, b""))
    questions = [v4.clip_yes_no(default_rng([6, seed])) for seed in range(400)]
    assert 170 <= sum(question.judge.right == "yes" for question in questions) <= 230


_LEFT, _UP = Direction("left"), Direction("up")
_CIRCLE, _NOTHING = Mover("red circle"), Nothing()
_BLUE, _SQUARE = LaterColour("red", "blue"), Turning("square", "red", "blue")
_TWO_AND_A_HALF = Instant(2.5)

_VERDICTS: list[tuple[Judge, str, bool]] = [
    (_LEFT, "from right to left", True),
    (_LEFT, "left or right", False),
    (_LEFT, "to the upper left", False),
    (_LEFT, "It is on the left.", False),
    (_UP, "Upwards", True),
    (_UP, "to the top", True),
    (_UP, "from top to bottom", False),
    (_UP, "up and down", False),
    (_CIRCLE, "The red circle moves, and the blue star stays where it is.", True),
    (_CIRCLE, "The blue star does not move; the red circle does.", True),
    (_CIRCLE, "Nothing but the red circle moves.", True),
    (_CIRCLE, "The red circle and the blue star.", False),
    (_CIRCLE, "Two red circles", False),
    (_CIRCLE, "The red circle and a star", False),
    (_CIRCLE, "Not the red circle.", False),
    (_NOTHING, "nothing", True),
    (_NOTHING, "Nothing in this video moves.", True),
    (_NOTHING, "Nothing happens.", True),
    (_NOTHING, "Nothing moves or changes.", True),
    (_NOTHING, "No object is moving.", True),
    (_NOTHING, "None of the objects move.", True),
    (_NOTHING, "It doesn't seem to move.", True),
    (_NOTHING, "Everything is still.", True),
    (_NOTHING, "There is no movement.", True),
    (_NOTHING, "I don't see anything moving.", True),
    (_NOTHING, "The red circle.", False),
    (_NOTHING, "Nothing moves, then the square turns blue.", False),
    (_NOTHING, "The circle is not still.", False),
    (_BLUE, "Blue.", True),
    (_BLUE, "Red.", False),
    (_SQUARE, "A square changes its colour from red to blue.", True),
    (_SQUARE, "The square becomes blue while the green star stays still.", True),
    (_SQUARE, "The blue square turns red.", False),
    (_SQUARE, "A blue square.", False),
    (_SQUARE, "The red square moves and turns blue.", False),
    (_SQUARE, "The red square and the star turn blue.", False),
    (_TWO_AND_A_HALF, "At 2s", True),
    (_TWO_AND_A_HALF, "2", True),
    (_TWO_AND_A_HALF, "1.5 s", True),
    (_TWO_AND_A_HALF, "two and a half seconds", True),
    (_TWO_AND_A_HALF, "at 0:02", True),
    (_TWO_AND_A_HALF, "After about 2,5 seconds. The clip is 5 seconds long.", True),
    (_TWO_AND_A_HALF, "At 1 or 2 seconds", False),
    (_TWO_AND_A_HALF, "-2 seconds", False),
    (_TWO_AND_A_HALF, "not at 2 seconds", False),
    (_TWO_AND_A_HALF, "five point two seconds", False),
]


@pytest.mark.parametrize(("judge", "answer", "verdict"), _VERDICTS)
def test_judges(judge: Judge, answer: str, verdict: bool) -> None:
    assert judge.accepts(answer) is verdict


def test_number_words_are_read_as_seconds() -> None:
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    assert [seconds_in(f"After {word} seconds.") for word in words] == [{float(value)} for value in range(13)]
    assert seconds_in("two point five seconds") == {2.5}
    assert seconds_in("half a second") == {0.5}


def test_an_exam_of_clips_in_this_process() -> None:
    questions = list(make_questions("v4", 10, 3))
    answers = iter(question.judge.right for question in questions)
    parts = []

    def knowing(messages: list[Message]) -> str:
        parts.append([part["type"] for part in messages[0]["content"]])
        return next(answers)

    report = examine(questions, knowing)
    assert parts == [["video_url", "text"]] * 10
    assert report.overall.accuracy == 1
    assert {name: tally.asked for name, tally in report.tables()["format"].items()} == {"mp4": 10}
    assert set(report.tables()["short side"]) <= {"64-127", "128-255", "256-511"}
    assert "face" not in report.tables()
    mean = report.means()["when"]
    assert (mean.measure, mean.count) == ("seconds off", 2)
    assert mean.value <= 0.05


def test_unread_times_have_no_mean() -> None:
    (question,) = [question for question in make_questions("v4", 5, 1) if question.kind == "when"]
    report = Report((Outcome(question, "in the middle"),), seconds=1.0)
    assert report.means() == {}
    wrong = json.loads(json.dumps(report.as_dict()))["wrong"][0]
    assert wrong["format"] == "mp4"
    assert wrong["size"] == [question.scene.width, question.scene.height]
