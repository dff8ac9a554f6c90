"""HTML of the page's own parts: its head, the gallery of samples, and the panel \"What the model saw\"."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Iterator, Sequence

from PIL import Image

from vlmserve.commands.client.chat_client import Stats
from vlmserve.commands.demo.pictures import Frame, SeenMedium, Thumbnail

_KINDS = {"image": "pictures", "video": "clips"}
WAITING = '<p class="saw-waiting">The model is at work …</p>'


def head(model: str, note: str) -> str:
    """Return the title, a sentence about the page, and the note."""
    about = (
        f"Ask <b>{html.escape(model)}</b> about pictures and video clips: add them to a question, or try an example."
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


def _sample(number: int, thumbnail: Thumbnail) -> str:
    badge = '<span class="sample-clip">▶ clip</span>' if thumbnail.is_clip else ""
    pictures = "".join(f'<img src="{_data_url(image)}" alt="">' for image in thumbnail.images)
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
    image = f'<img src="{_data_url(frame.image)}" alt="">'
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


def _data_url(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "WEBP", quality=85)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()
