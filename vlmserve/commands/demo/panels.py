"""HTML of the page's own parts: its head, the gallery of samples, the panel \"What the model saw\", and a search."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from PIL import Image

from vlmserve.commands.client.chat_client import Stats
from vlmserve.commands.demo.pictures import Frame, SeenMedium, Thumbnail

if TYPE_CHECKING:
    from vlmserve.commands.demo.search import Album, Picture

_KINDS = {"image": "pictures", "video": "clips"}
WAITING = '<p class="saw-waiting">The model is at work …</p>'


def head(model: str, note: str, *, searches: bool = False) -> str:
    """Return the title, a sentence about the page, and the note. searches: the model is an embedder."""
    name = f"<b>{html.escape(model)}</b>"
    about = (
        f"Search your pictures with {name}: add a folder of them, and write what they are to show."
        if searches
        else f"Ask {name} about pictures and video clips: add them to a question, or try an example."
    )
    return f"<h1>vlmserve</h1><p>{about} {html.escape(note)}</p>"


def gallery(thumbnails: Iterable[Thumbnail]) -> str:
    """Return a button for each sample, with its number in `data-sample`."""
    return f'<h2>Examples</h2><div class="samples">{"".join(map(_sample, range(10**6), thumbnails))}</div>'


def saw(media: Sequence[SeenMedium], num_media: int, stats: Stats, notes: Iterable[str]) -> str:
    """Return the panel. num_media: of the whole prompt, whose last ones are `media`."""
    hidden = num_media - len(media)
    earlier = f'<p class="saw-more">and {hidden} earlier: not shown, and seen all the same</p>' if hidden else ""
    told = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return "".join(
        [
            "<h2>What the model saw</h2>",
            earlier,
            *map(_medium, media),
            _tokens(stats),
            _stages(stats),
            f'<ul class="saw-notes">{told}</ul>' if told else "",
        ]
    )


def no_search(said: str) -> str:
    """Return what stands in place of a search by a model that cannot. said: by the server."""
    return (
        "<p>Searching needs an embedder, and this model is none. For one, start the page with "
        "<code>vlmserve demo Qwen/Qwen3-VL-Embedding-2B</code>, or give it the <code>--url</code> of a server that has "
        f'one.</p><p class="saw-more">This server says: {html.escape(said)}</p>'
    )


_SHOWN_PROBLEMS = 5


def album(seen: Album, left: int = 0) -> str:
    """Return how far the pictures of a folder are. left: files beyond the most."""
    if not seen.given:
        return ""
    done = len(seen.pictures)
    lines = [f"{_count(done, 'picture')} can be searched" if seen.is_whole else f"{done:,} of {seen.given:,} files …"]
    if left > 0:
        lines.append(f"{_count(left, 'further file')} left out: a folder may have {seen.given:,} here")
    problems = [*seen.problems[:_SHOWN_PROBLEMS]]
    if more := len(seen.problems) - len(problems):
        problems.append(f"and {_count(more, 'further file')} that failed")
    told = "".join(f"<li>{html.escape(line)}</li>" for line in problems)
    return f'<p>{". ".join(lines)}</p><ul class="saw-notes">{told}</ul>'


def found(best: Sequence[tuple[Picture, float]]) -> str:
    """Return pictures with their scores, the best one first."""
    cells = (
        f'<figure><img src="{one.shown}" alt=""><figcaption>{html.escape(one.name)} · {score:.3f}</figcaption></figure>'
        for one, score in best
    )
    return f'<div class="found">{"".join(cells)}</div>'


def not_found(reason: str) -> str:
    """Return why there are no pictures."""
    return f'<p class="saw-more">{html.escape(reason)}</p>'


def _sample(number: int, thumbnail: Thumbnail) -> str:
    badge = '<span class="sample-clip">▶ clip</span>' if thumbnail.is_clip else ""
    pictures = "".join(f'<img src="{data_url(image)}" alt="">' for image in thumbnail.images)
    text = html.escape(thumbnail.question)
    return (
        f'<button type="button" class="sample" data-sample="{number}" title="{text}">'
        f'<span class="sample-pictures">{pictures}{badge}</span><span class="sample-text">{text}</span></button>'
    )


def _medium(medium: SeenMedium) -> str:
    if medium.problem is not None:
        shown = f'<p class="saw-more">cannot be shown here: {html.escape(medium.problem)}</p>'
    else:
        grid = _grid(medium)
        frames = ("".join(_frame(frame, grid) for frame in step) for step in medium.steps)
        kind = "saw-clip" if medium.report.get("video") else "saw-picture"
        steps = "".join(f'<div class="saw-step">{step}</div>' for step in frames)
        shown = f'<div class="{kind}">{steps}</div>'
    return f'<figure class="saw-medium">{shown}<figcaption>{" · ".join(_facts(medium))}</figcaption></figure>'


def _frame(frame: Frame, grid: str) -> str:
    time = "" if frame.seconds is None else f"<small>{frame.seconds:.2f} s</small>"
    image = f'<img src="{data_url(frame.image)}" alt="">'
    widest = f"max-width:{60 * frame.image.width / frame.image.height:.1f}vh"  # tall pictures fit the screen
    return f'<div class="saw-frame"><div class="saw-image" style="{widest}">{image}{grid}</div>{time}</div>'


def _grid(medium: SeenMedium) -> str:
    """Return lines between patches, and stronger ones between tokens, that scale with the picture."""
    width, height = medium.patches
    side = medium.patches_of_a_token

    def lines(step: int) -> str:
        across = "".join(f"M{x} 0V{height}" for x in range(step, width, step))
        return across + "".join(f"M0 {y}H{width}" for y in range(step, height, step))

    return (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="saw-patches" d="{lines(1)}"/><path class="saw-tokens" d="{lines(side)}"/></svg>'
    )


def _facts(medium: SeenMedium) -> Iterator[str]:
    report = medium.report
    source, final = (f"{report[key]['width']}×{report[key]['height']}" for key in ("source_size", "final_size"))
    video = report.get("video")
    yield f"<b>{'Picture' if video is None else 'Clip'} {medium.number}</b>"
    if video is not None:
        shown, used = sum(map(len, medium.steps)), len(video["frame_indices"])
        some = f" ({shown} shown)" if 0 < shown < used else ""
        yield f"{used} of {video['source_frames']} frames{some} in {video['source_duration_s']:.1f} s"
    yield f"{source} resized to {final} pixels" if source != final else f"{final} pixels"
    width, height = medium.patches
    side, steps = medium.patches_of_a_token, report["grid_thw"][0]
    if video is None:
        yield f"{width}×{height} patches (fine lines)"
        yield f"<b>{_count(report['tokens'], 'token')}</b> of {side}×{side} patches (strong lines)"
    else:
        yield f"{width}×{height} patches at {_count(steps, 'time')}"
        yield f"<b>{_count(report['tokens'], 'token')}</b> of {side}×{side} patches (the lines)"


def _tokens(stats: Stats) -> str:
    media = sum(stats.media_tokens.values())
    parts = [f"{count} of {_KINDS.get(kind, kind)}" for kind, count in stats.media_tokens.items()]
    parts.append(f"{stats.prompt_tokens - media} of text")
    rate = stats.tokens_per_s()
    cached = f"{100 * stats.cached_tokens / max(1, stats.prompt_tokens):.0f}% of the prompt"
    rows = [
        ("Prompt", _count(stats.prompt_tokens, "token"), ", ".join(parts)),
        ("Cached", _count(stats.cached_tokens, "token"), cached),
        ("Answer", _count(stats.completion_tokens, "token"), "" if rate is None else f"{rate:.0f} a second"),
    ]
    cells = "".join(f"<tr><th>{name}</th><td>{number}</td><td>{more}</td></tr>" for name, number, more in rows)
    return f'<table class="saw-tokens-table"><tbody>{cells}</tbody></table>'


def _stages(stats: Stats) -> str:
    stages = stats.stages()
    bar = "".join(
        f'<span class="stage-{number}" style="flex-grow:{max(0.0, 1000 * seconds):.3f}"></span>'
        for number, (_, seconds) in enumerate(stages)
    )
    names = "".join(
        f'<li><span class="stage-{number}"></span>{name} {_duration(seconds)}</li>'
        for number, (name, seconds) in enumerate(stages)
    )
    total = f"First word after {_duration(stats.ttft_s)}, all after {_duration(stats.total_s)}"
    return f'<p class="saw-total">{total}</p><div class="stages">{bar}</div><ul class="stage-names">{names}</ul>'


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def data_url(image: Image.Image) -> str:
    """Return a picture as a URL that holds it."""
    data = io.BytesIO()
    image.save(data, "WEBP", quality=85)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()
