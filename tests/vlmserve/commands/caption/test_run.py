"""What is asked, and which items; what becomes of failures."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processors.clips import make_clip
from tests.vlmserve.commands.caption.runs import (
    PNG,
    FakeCaptioner,
    caption_of,
    captions_in,
    content,
    item,
    lines,
    medium_of,
    output_settings,
    run_once,
)
from vlmserve.commands.batch.item import Failed, MediumItem
from vlmserve.commands.caption import templates
from vlmserve.commands.caption.command import read_command
from vlmserve.commands.caption.feed import ItemShard
from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.opening import CaptionSettings
from vlmserve.commands.caption.prompts import Prompts
from vlmserve.commands.caption.run import ByteBudget, CaptionStopped
from vlmserve.commands.caption.session import Ended, caption
from vlmserve.commands.caption.templates import TemplateProcess, render
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.child import ChildProcess


@pytest.fixture
def out(tmp_path):
    return output_settings(tmp_path / "out.jsonl")


@pytest.fixture
def errors(tmp_path):
    return tmp_path / "errors.jsonl"


def test_identical_pictures_are_captioned_once(tmp_path, out):
    captioner = FakeCaptioner()
    found = [item(f"p/{number}", content(number % 2), place=number) for number in range(10)]
    tally = run_once(found, out, captioner=captioner, settings=CaptionSettings(concurrency=4))
    assert sorted(captioner.asked) == [content(0), content(1)]
    assert (tally.done, tally.reused) == (2, 8)
    there = lines(tmp_path / "out.jsonl")
    assert {(line["id"], line["caption"]) for line in there} == {
        (f"p/{number}", caption_of(content(number % 2))) for number in range(10)
    }
    assert all(line["id"] == f"p/{line['fields']['place']}" for line in there), "each with its own fields"
    again = FakeCaptioner()
    run_once([item("elsewhere", content(0))], out, captioner=again)
    assert again.asked == [], "nor by a later run"


def test_the_same_picture_with_another_prompt_is_another_question(out, made):
    captioner = FakeCaptioner()
    prompts = made(Prompts("Is it a {{ kind }}?"))
    found = [item("a", PNG, kind="cat"), item("b", PNG, kind="dog"), item("c", PNG, kind="cat")]
    run_once(found, out, captioner=captioner, prompts=prompts)
    asked = sorted(request.messages[-1]["content"][1]["text"] for request in captioner.requests)
    assert asked == ["Is it a cat?", "Is it a dog?"]


def test_a_finished_item_is_not_read_again_until_its_file_changes(out, tmp_path):
    reads: list[str] = []

    def file(signature: str, data: bytes) -> MediumItem:
        def read() -> bytes:
            reads.append(signature)
            return data

        return MediumItem(id="a", signature=signature, read=read, fields={})

    captioner = FakeCaptioner()
    run_once([file("1", content(1))], out, captioner=captioner)
    run_once([file("1", content(1))], out, captioner=captioner)
    assert reads == ["1"]
    tally = run_once([file("touched", content(1))], out, captioner=captioner)
    assert (reads, len(captioner.asked), tally.skipped) == (["1", "touched"], 1, 1)
    run_once([file("touched", content(1))], out, captioner=captioner)
    assert reads == ["1", "touched"], "and its new look is remembered"
    run_once([file("changed", content(2))], out, captioner=captioner)
    assert captions_in(tmp_path / "out.jsonl") == [("a", caption_of(content(1))), ("a", caption_of(content(2)))]


def test_one_unreadable_item_costs_one_line(tmp_path, out, errors):
    def hook(request) -> None:
        if medium_of(request) == content(5):
            raise BadRequestError("the picture has 9 pixels, the limit is 4", code="too_many_pixels")

    found = [
        item("p/0", content(0)),
        item("p/1"),
        Failed(id="folder", message="cannot be read"),
        item("p/2", b"no picture at all"),
        item("p/3", b""),
        item("p/4", content(4)),
        item("p/5", content(5)),
    ]
    tally = run_once(found, out, errors=errors, captioner=FakeCaptioner(hook))
    assert sorted(captions_in(tmp_path / "out.jsonl")) == [(f"p/{n}", caption_of(content(n))) for n in (0, 4)]
    told = 'the file is neither a picture nor a video of a supported format; it begins with "no pictu"'
    failures = {line["id"]: (line["code"], line["message"]) for line in lines(errors)}
    assert failures == {
        "p/1": ("unreadable", "cannot read 'p/1'"),
        "folder": ("unreadable", "cannot be read"),
        "p/2": ("unsupported_content", told),
        "p/3": ("unsupported_content", "the file is empty"),
        "p/5": ("too_many_pixels", "the picture has 9 pixels, the limit is 4"),
    }
    assert (tally.done, tally.failed) == (2, 5)
    run_once(found[:1], out, errors=errors)
    assert "folder" not in [line["id"] for line in lines(errors)], "it can be read again"


def test_each_engine_has_its_own_items_at_a_time(out):
    three = asyncio.Barrier(3)

    class OnThreeEngines(FakeCaptioner):
        engines = 3

        async def ask(self, request):
            await asyncio.wait_for(three.wait(), 30.0)  # fails if fewer come
            return await super().ask(request)

    found = [item(f"p/{number}", content(number)) for number in range(6)]
    assert run_once(found, out, captioner=OnThreeEngines(), settings=CaptionSettings(concurrency=1)).done == 6


def test_failures_are_tried_again_when_asked_for(out, errors):
    broken = True

    def hook(request) -> None:
        if broken and medium_of(request) != content(0):
            raise EngineError("the engine failed on it")

    found = [item(f"p/{number}", content(number)) for number in range(3)]
    captioner, in_turn = FakeCaptioner(hook), CaptionSettings(concurrency=1)
    assert run_once(found, out, captioner=captioner, errors=errors, settings=in_turn).failed == 2
    tally = run_once(found, out, captioner=captioner, errors=errors)
    assert (tally.skipped, tally.failed_before, tally.failed) == (1, 2, 0)
    assert len(captioner.asked) == 3
    assert [line["id"] for line in lines(errors)] == ["p/1", "p/2"], "they still stand"
    broken = False
    tally = run_once(found, out, captioner=captioner, errors=errors, retry_failed=True)
    assert (tally.done, tally.skipped) == (2, 1)
    assert lines(errors) == []


def test_shards_are_parts_of_the_whole(tmp_path):
    found = [item(f"p/{number}", content(number)) for number in range(40)]
    parts = []
    for index in range(3):
        output = output_settings(tmp_path / f"out-{index}.jsonl")
        run_once(found, output, shard=ItemShard(index=index, count=3))
        parts.append({id_ for id_, _ in captions_in(tmp_path / f"out-{index}.jsonl")})
    assert set.union(*parts) == {each.id for each in found}
    assert sum(map(len, parts)) == 40
    limited = output_settings(tmp_path / "limited.jsonl")
    assert (run_once(found, limited, limit=4).done, run_once(found, limited).done) == (4, 36)
    assert all(len(part) > 5 for part in parts)


def test_an_endless_supply_is_pulled_not_listed(tmp_path, out):
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield item(f"p/{taken}", content(taken))

    captioner = FakeCaptioner(most=20)  # the first 20 that come to it, whichever threads read them
    with pytest.raises(CaptionStopped, match="no server answers"):
        run_once(endless(), out, captioner=captioner, settings=CaptionSettings(concurrency=5))
    assert taken <= 20 + 2 * 5
    ids = {content(number): f"p/{number}" for number in range(1, taken + 1)}
    assert len(captioner.asked) == 20
    assert sorted(captions_in(tmp_path / "out.jsonl")) == sorted(
        (ids[data], caption_of(data)) for data in captioner.asked
    ), "what is finished is written"


def test_items_named_twice_are_done_once_and_two_of_one_name_are_told(tmp_path, out, errors):
    found = [item("a", content(1)), item("a", content(1)), item("b", content(2)), item("b", content(3))]
    tally = run_once(found, out, errors=errors, settings=CaptionSettings(concurrency=1))
    assert (tally.done, tally.repeated, tally.failed) == (2, 1, 1)
    (line,) = lines(errors)
    assert (line["id"], line["code"]) == ("b", "same_id")


def test_options_knobs_and_seeds(out):
    captioner = FakeCaptioner()
    settings = CaptionSettings(
        concurrency=1,
        options={"max_tokens": 9, "temperature": 0.5},
        picture_knobs={"max_pixels": 100},
        video_knobs={"max_pixels": 100, "fps": 2.0},
    )
    own = MediumItem(
        id="own",
        signature="own",
        read=lambda: content(1),
        options={"max_tokens": 5, "mm_processor_kwargs": {"max_pixels": 7}},
    )
    found = [item("picture", PNG), item("clip", make_clip(4)), own]
    run_once(found, out, captioner=captioner, settings=settings, prompts=Prompts("What?", system="Be brief."))
    picture, clip, last = captioner.requests
    assert picture.messages[0] == {"role": "system", "content": "Be brief."}
    assert picture.messages[1]["content"][0] == {"type": "image", "image": PNG, "max_pixels": 100}
    part = clip.messages[1]["content"][0]
    assert (part["type"], part["fps"], part["max_pixels"]) == ("video", 2.0, 100)
    assert "max_pixels" not in last.messages[1]["content"][0], "the item's own goes before"
    assert (last.options["max_tokens"], last.options["mm_processor_kwargs"]) == (5, {"max_pixels": 7})
    assert picture.options["seed"] != clip.options["seed"]
    again = FakeCaptioner()
    prompts = Prompts("What?", system="Be brief.")
    run_once([item("elsewhere", PNG)], out, captioner=again, settings=settings, prompts=prompts, restart=True)
    assert again.requests[0].options["seed"] == picture.options["seed"], "whatever is in work beside it"


def test_prefix_and_suffix_are_around_captions(tmp_path, out, made):
    prompts = made(Prompts("What?", prefix="a {{ style }} of ", suffix=", 4k"))
    run_once([item("a", PNG, style="photo")], out, prompts=prompts)
    assert captions_in(tmp_path / "out.jsonl") == [("a", f"a photo of {caption_of(PNG)}, 4k")]


def test_no_more_bytes_than_allowed_are_in_memory(out):
    held = most = 0

    def big(number: int) -> MediumItem:
        data = content(number) + bytes(1000)

        def read() -> bytes:
            nonlocal held, most
            held += 1
            most = max(most, held)
            return data

        return MediumItem(id=str(number), signature=str(number), size=len(data), read=read)

    class Counts(FakeCaptioner):
        async def ask(self, request):
            nonlocal held
            if len(self.asked) < 3:  # so many come in, and are waited for
                answer = super().ask(request)
                self.asked.append(b"")
                while len(self.asked) < 3:
                    await asyncio.sleep(0)
                await answer
            held -= 1
            return await super().ask(request)

    settings = CaptionSettings(concurrency=8, bytes_in_memory=3300)
    assert run_once([big(number) for number in range(30)], out, captioner=Counts(), settings=settings).done == 30
    assert most == 3


@given(
    total=st.integers(1, 20),
    holders=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.booleans()), max_size=20),
)
def test_memory_is_given_in_turn_and_given_back(total, holders):
    budget, held, order = ByteBudget(total), 0, []

    async def hold(number: int, size: int, turns: int) -> None:
        nonlocal held
        async with budget.hold(size):
            order.append(number)
            held += min(size, total)
            assert held <= total
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                held -= min(size, total)

    async def run() -> None:
        tasks = [asyncio.create_task(hold(n, size, turns)) for n, (size, turns, _) in enumerate(holders)]
        await asyncio.sleep(0)
        for task, (_, _, gives_up) in zip(tasks, holders, strict=True):
            if gives_up:
                task.cancel()
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        async with asyncio.timeout(10):
            async with budget.hold(total):  # everything was given back
                pass

    asyncio.run(run())
    assert order == sorted(order)
    assert set(order) >= {number for number, (_, _, gives_up) in enumerate(holders) if not gives_up}


def test_the_next_item_is_asked_about_while_a_result_is_being_written(out, monkeypatch):
    two_asked = threading.Event()
    add = CaptionJournal.add
    waited = []

    def slow(self, done, *args, **more):
        if done and not waited:
            waited.append(two_asked.wait(20))
        add(self, done, *args, **more)

    class Tells(FakeCaptioner):
        async def ask(self, request):
            answer = await super().ask(request)
            if len(self.asked) == 2:
                two_asked.set()
            return answer

    monkeypatch.setattr(CaptionJournal, "add", slow)
    items = [item(f"{number}.png", content(number)) for number in range(4)]
    assert run_once(items, out, captioner=Tells(), settings=CaptionSettings(concurrency=1)).done == 4
    assert waited == [True]


def at(path: Path, root: Path, **given) -> MediumItem:
    return MediumItem(id=str(path), signature="1", read=bytes, path=path, root=root, **given)


def medium(**fields) -> MediumItem:
    return MediumItem(id="a", signature="1", read=bytes, fields=fields)


def test_fields_are_put_in(made):
    template = "Describe this {{ kind }}{% if tags %}, tagged {{ tags | join(', ') }}{% endif %}."
    prompts = made(Prompts(template, prefix="{{ kind }}: ", suffix=" ({{ kind | upper }})"))
    asked = prompts.ask(medium(kind="cat", tags=["soft", "grey"]))
    assert asked.prompt == "Describe this cat, tagged soft, grey."
    assert asked.whole("Sleeps.") == "cat: Sleeps. (CAT)"
    assert prompts.ask(medium(kind="dog", tags=[])).prompt == "Describe this dog."


def test_what_is_not_there_is_told_with_what_is(made):
    with pytest.raises(BadRequestError, match="the prompt is empty"):
        made(Prompts("{{ text }}")).ask(medium(text=" "))
    with pytest.raises(BadRequestError, match=r"needs what is not there: 'colour' is undefined; its fields: id, kind"):
        made(Prompts("A {{ colour }} {{ kind }}")).ask(medium(kind="cat", id="a"))


@pytest.mark.parametrize("name", ["prompt", "prefix", "suffix"])
def test_no_template(name, made):
    given = {"prompt": "x", "prefix": "", "suffix": "", name: "{% if %}"}
    with pytest.raises(SettingsError, match=rf"--{name}: the template '\{{% if %\}}' is no Jinja2 template"):
        made(Prompts(given["prompt"], prefix=given["prefix"], suffix=given["suffix"])).check()


@pytest.mark.parametrize("name", ["prompt", "prefix", "suffix"])
def test_a_bomb_of_the_users_own_fails_the_items_alone(name, made):
    prompts = made(Prompts(**{"prompt": "x", name: "{{ 'a' * 10**10 }}"}))
    with pytest.raises(BadRequestError, match="takes more than 512 MiB of memory"):
        prompts.ask(medium())


def test_a_field_that_no_item_has_is_told_at_the_start(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "x.png").write_bytes(PNG)
    (tmp_path / "list.txt").write_text("p/x.png\n")
    (tmp_path / "rows.jsonl").write_text('{"image": "p/x.png"}\n')
    parquet.write_table(pyarrow.table({"image": [PNG], "kind": ["cat"]}), tmp_path / "a.parquet")
    names = "their fields: folder, id, name, stem"

    def told(prompt: str, *words: str) -> str:
        inputs = [str(tmp_path / word) for word in words]
        command = read_command([*inputs, "--prompt", prompt, "--output", str(tmp_path / "o.jsonl"), "--restart"])
        try:
            tally = caption(command, io.BytesIO(), io.StringIO(), captioner=FakeCaptioner()).tally
        except SettingsError as error:
            return str(error)
        return f"{tally.done} done, {tally.failed} failed"

    for word in ("p", "p/x.png", "p/*.png", "list.txt"):
        assert f"needs what no item has: kind; {names}" in told("A {{ kind }}, {{ name }}?", word)
    for word in ("a.parquet", "*.parquet"):
        assert "has: colour; their fields: folder, id, image, kind, name, stem" in told(
            "A {{ colour }} {{ kind }}", word
        )
        assert told("A {{ kind }}", word) == "1 done, 0 failed"
    assert told("A {{ kind }}", "a.parquet", "p") == "1 done, 1 failed", "one of them has it"
    assert told("A {{ kind }}", "rows.jsonl") == "0 done, 1 failed", "another line may have it"
    assert told("A {{ kind | default('pet') }} {% if age is defined %}{{ age }}{% endif %}", "p") == "1 done, 0 failed"


@pytest.fixture
def made(request):
    """Prompts that are closed at the end of the test."""

    def closed_later(prompts: Prompts) -> Prompts:
        request.addfinalizer(prompts.close)
        return prompts

    return closed_later


@pytest.fixture(scope="module")
def strangers():
    process = TemplateProcess(cpu_s=0.1)
    yield process
    process.close()


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ ''.__class__.__mro__ }}", "cannot be filled in: SecurityError"),
        ("{{ id.__init__.__globals__ }}", "cannot be filled in: SecurityError"),
        ("{{ 1 // 0 }}", "cannot be filled in: ZeroDivisionError"),
        ("{% if %}", "cannot be filled in: TemplateSyntaxError"),
        ("{{ colour }}", "needs what is not there: 'colour' is undefined; its fields: id"),
        ("{{ 'a' * 10**10 }}", "takes more than 512 MiB of memory"),
        ("{% set x = [0] * 10**10 %}", "takes more than 512 MiB of memory"),
        ("{{ id * 2**21 }}", "becomes 2097152 characters; the most are 1048576"),
    ],
)
def test_templates_of_strangers_get_nowhere(strangers, template, told):
    with pytest.raises(BadRequestError, match=re.escape(told)):
        strangers.render(template, {"id": "a"})
    assert strangers.render("{{ id }}", {"id": "b"}) == "b"


def test_a_template_that_takes_long_is_given_up(strangers, monkeypatch):
    starts: list[ChildProcess] = []

    class Counted(ChildProcess):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            starts.append(self)

    monkeypatch.setattr(templates, "ChildProcess", Counted)
    for _ in range(5):
        with pytest.raises(BadRequestError, match=r"takes more than 0.1 s of CPU time, or breaks the process"):
            strangers.render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", {})
    assert strangers.render("{{ id }}", {"id": "b"}) == "b"
    assert len(starts) == 2, "not five times"


@pytest.mark.parametrize("text", ["a\r\nb\rc\n\n", "\n", "", " x }} {", "{'a': 1} \n"])
def test_text_without_marks_is_as_jinja_has_it_and_needs_no_process(text, monkeypatch):
    monkeypatch.setattr(templates, "ChildProcess", None)
    assert TemplateProcess().render(text, {}) == render(text, {})


def test_a_bomb_in_a_data_set_fails_its_rows_alone(tmp_path, errors):
    for name, prompt in (("bad", "{{ 'a' * 10**10 }}"), ("good", "What is {{ stem }}?")):
        folder = tmp_path / "in" / name
        folder.mkdir(parents=True)
        (folder / "prompt.txt").write_text(prompt)
        (folder / f"{name}.png").write_bytes(content(len(name)))
    (tmp_path / "x.png").write_bytes(content(1))
    rows = [
        {"image": "x.png", "id": "a", "kind": "cat", "prompt": "{{ kind * 10**10 }}"},
        {"image": "x.png", "id": "b", "kind": "dog", "prompt": "A {{ kind }}?"},
        {"image": "x.png", "id": "c", "kind": "cow"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [tmp_path / "in", tmp_path / "rows.jsonl", "--output", tmp_path / "o.jsonl", "--errors", errors]
    command = read_command([*map(str, words), "--prompt", "Of {{ kind }}."])
    ended = caption(command, io.BytesIO(), io.StringIO(), captioner=FakeCaptioner())
    assert (ended.how, ended.tally.done, ended.tally.failed) == (Ended.FINISHED, 3, 2)
    assert sorted(line["prompt"] for line in lines(tmp_path / "o.jsonl")) == ["A dog?", "Of cow.", "What is good?"]
    bad = str(tmp_path / "in" / "bad" / "bad.png")
    assert {(line["id"], line["code"]) for line in lines(errors)} == {("a", "invalid_prompt"), (bad, "invalid_prompt")}
    assert all("takes more than 512 MiB of memory" in line["message"] for line in lines(errors))


def test_the_nearest_prompt_counts(tmp_path, made):
    prompts = Prompts("from the command line")
    deep = tmp_path / "root" / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "prompt.txt").write_text("outside of what was named")
    picture = at(deep / "x.png", tmp_path / "root")
    assert prompts.ask(picture).prompt == "from the command line"
    (tmp_path / "root" / "prompt.txt").write_text("from the root\n")
    assert Prompts("from the command line").ask(picture).prompt == "from the root"
    (tmp_path / "root" / "a" / "prompt.txt").write_text("\ufefffrom a: {{ kind }}", encoding="utf-8")
    nearer = made(Prompts("from the command line"))
    assert nearer.ask(at(deep / "x.png", tmp_path / "root", fields={"kind": "cat"})).prompt == "from a: cat"
    assert nearer.ask(at(tmp_path / "root" / "y.png", tmp_path / "root")).prompt == "from the root"
    assert nearer.ask(at(deep / "x.png", tmp_path / "root", prompt="its own")).prompt == "its own"


@pytest.mark.parametrize(("data", "told"), [(b"\xff\xfe", "is not UTF-8"), (b"x" * (2**20 + 1), "more than 1048576")])
def test_a_bad_prompt_file_fails_its_pictures(tmp_path, data, told):
    (tmp_path / "prompt.txt").write_bytes(data)
    with pytest.raises(BadRequestError, match=told):
        Prompts("x").ask(at(tmp_path / "x.png", tmp_path))
