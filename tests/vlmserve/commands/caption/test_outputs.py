"""What outputs hold, and what they refuse."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.vlmserve.commands.caption.runs import (
    FakeCaptioner,
    caption_of,
    captions_in,
    content,
    item,
    lines,
    output_settings,
    run_once,
)
from vlmserve.commands.batch.item import ChatRequest, MediumItem, RequestItem
from vlmserve.commands.caption.feed import ItemShard
from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.opening import CaptionSettings
from vlmserve.commands.caption.session import choose_journal, choose_output
from vlmserve.config.checks import SettingsError


def items(count: int) -> list[MediumItem]:
    return [item(f"p/{number}", content(number)) for number in range(count)]


def files(folder: Path, names: dict[str, bytes]) -> list[MediumItem]:
    """Real files, as a folder of the command line brings them."""
    found = []
    for name, data in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        found.append(MediumItem(id=str(path), signature=name, read=path.read_bytes, path=path, root=folder))
    return found


def test_lines_say_what_is_known(tmp_path):
    run_once([item("p/1", content(1), category="cat")], output_settings(tmp_path / "out.jsonl"))
    (line,) = lines(tmp_path / "out.jsonl")
    assert line["blake3"]
    del line["blake3"]
    assert line == {
        "id": "p/1",
        "caption": caption_of(content(1)),
        "model": "fake",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "prompt": "Describe it.",
        "fields": {"id": "p/1", "category": "cat"},
    }


def test_a_run_that_was_killed_with_more_than_a_part_in_the_journal_is_finished(tmp_path, monkeypatch):
    name = tmp_path / "out-%05d.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(CaptionJournal, "set_part", killed)
        with pytest.raises(KeyboardInterrupt):
            run_once(items(9), output_settings(name, items_per_file=100))
    run_once(items(12), output_settings(name, items_per_file=4))
    assert sorted(captions_in(name)) == sorted((f"p/{n}", caption_of(content(n))) for n in range(12))


def killed(*args: object) -> None:
    raise KeyboardInterrupt


def test_lines_that_were_removed_are_written_again(tmp_path):
    output, captioner = output_settings(tmp_path / "out.jsonl"), FakeCaptioner()
    run_once(items(3), output)
    before = sorted(captions_in(tmp_path / "out.jsonl"))
    (tmp_path / "out.jsonl").unlink()
    run_once(items(4), output, captioner=captioner)
    assert sorted(captions_in(tmp_path / "out.jsonl")) == [*before, ("p/3", caption_of(content(3)))]
    assert captioner.asked == [content(3)]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("out.jsonl", "out.jsonl"),
        ("out.parquet", "out.parquet"),
        ("out-%05d.parquet", "out-00000.parquet"),
        ("out-%05d.parquet", "out-00002.parquet"),
        ("out-%05d.tar", "out-00000.tar"),
        ("out-%05d.tar", "out-00001.tar"),
        ("out-%05d.tar", "out-00001.tar.part"),
        ("out.tar", "out-00001.tar"),
    ],
)
def test_somebody_elses_output_is_left_alone(tmp_path, name, there):
    path = tmp_path / there
    path.write_bytes(b"mine")
    for restart in (False, True):
        with pytest.raises(SettingsError, match=r"is there already, and no journal says what is in it: name another"):
            run_once(items(1), output_settings(tmp_path / name), restart=restart)
        assert path.read_bytes() == b"mine"


def test_a_shortened_output_is_refused(tmp_path):
    output = output_settings(tmp_path / "out.jsonl")
    run_once(items(2), output)
    (tmp_path / "out.jsonl").write_bytes(b"{}\n")
    with pytest.raises(SettingsError, match=r"has 3 bytes, but \d+ were written to it"):
        run_once(items(2), output)


def test_two_runs_on_one_output(tmp_path):
    output = output_settings(tmp_path / "out.jsonl")
    with CaptionJournal(choose_journal(output["output"], [], ItemShard())):
        child = os.fork()  # another process, as locks of SQLite's are a process's
        if child == 0:
            try:
                CaptionJournal(choose_journal(output["output"], [], ItemShard()))
            except SettingsError as error:
                os._exit(0 if "is in use by another run" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    # with journals of their own, the output itself is locked
    run_once(items(1), output)
    with (tmp_path / "out.jsonl").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SettingsError, match="in use by another run: give each its own --output"):
            run_once(items(1), output)


@pytest.mark.parametrize("name", ["out.jsonl", "out-%05d.tar", "out.parquet"])
def test_restart_forgets_what_was_there(tmp_path, name):
    output, captioner = output_settings(tmp_path / name), FakeCaptioner()
    run_once(items(9), output)
    with pytest.raises(SettingsError, match=r'prompt was "Describe it.", is "Other"'):
        run_once(items(2), output, journal_settings={"prompt": "Other"})
    run_once(items(2), output, journal_settings={"prompt": "Other"}, restart=True, captioner=captioner)
    assert sorted(captions_in(tmp_path / name)) == [(f"p/{n}", caption_of(content(n))) for n in range(2)]
    assert len(captioner.asked) == 2


def test_tars_are_webdataset(tmp_path):
    class Together(FakeCaptioner):
        async def ask(self, request):
            answer = await super().ask(request)
            while len(self.asked) < 9:
                await asyncio.sleep(0)
            return answer

    output, settings = output_settings(tmp_path / "out-%05d.tar"), CaptionSettings(concurrency=9)
    run_once(items(9), output, captioner=Together(), settings=settings)
    names = sorted(path.name for path in tmp_path.glob("out*"))
    assert names == ["out-00000.tar", "out-00001.tar", "out-00002.tar", "out-N.tar.journal"]
    samples: dict[str, dict[str, bytes]] = {}
    sizes = []
    for name in names[:-1]:
        with tarfile.open(tmp_path / name) as tar:
            members = list(tar)
            sizes.append(len(members) // 3)
            for member in members:
                key, _, suffix = member.name.partition(".")
                samples.setdefault(key, {})[suffix] = tar.extractfile(member).read()
    assert sizes == [4, 4, 1], "as many as --items-per-file says"
    assert sorted(samples) == [f"{number:09d}" for number in range(9)]
    for sample in samples.values():
        known = json.loads(sample["json"])
        assert sample["png"] == content(int(known["id"].removeprefix("p/")))
        assert sample["txt"].decode() == caption_of(sample["png"]) + "\n"


def test_a_tar_that_was_finished_but_not_renamed(tmp_path):
    output = output_settings(tmp_path / "out-%05d.tar")
    run_once(items(4), output)
    (tmp_path / "out-00000.tar").rename(tmp_path / "out-00000.tar.part")
    run_once(items(5), output)
    assert len(captions_in(tmp_path / "out-%05d.tar")) == 5
    assert not list(tmp_path.glob("*.part"))


def test_one_parquet_file_grows_from_run_to_run(tmp_path):
    output = output_settings(tmp_path / "out.parquet")
    run_once(items(3), output)
    run_once(items(7), output)
    assert sorted(captions_in(tmp_path / "out.parquet")) == [(f"p/{n}", caption_of(content(n))) for n in range(7)]
    (tmp_path / "out.parquet").unlink()
    run_once(items(7), output)
    assert len(captions_in(tmp_path / "out.parquet")) == 7


def test_captions_beside_pictures(tmp_path):
    found = files(tmp_path, {"a.png": content(1), "below/b.c.png": content(2)})
    run_once(found, output_settings(None), folders=[tmp_path])
    assert (tmp_path / "a.txt").read_text() == caption_of(content(1)) + "\n"
    assert (tmp_path / "below" / "b.c.txt").read_text() == caption_of(content(2)) + "\n"
    (tmp_path / "a.txt").unlink()
    (tmp_path / "below" / "b.c.txt").write_bytes(b"")  # as after a crash of the machine
    tally = run_once(found, output_settings(None), folders=[tmp_path])
    assert (tally.skipped, tally.done) == (2, 0)
    assert (tmp_path / "a.txt").read_text() == caption_of(content(1)) + "\n", "put back"
    assert (tmp_path / "below" / "b.c.txt").read_text() == caption_of(content(2)) + "\n"
    (tmp_path / "a.txt").write_text("corrected by hand")
    run_once(found, output_settings(None), folders=[tmp_path])
    assert (tmp_path / "a.txt").read_text() == "corrected by hand"


def test_somebody_elses_text_beside_a_picture_is_kept(tmp_path):
    found = files(tmp_path, {"a.png": content(1), "b.png": content(2), "b.jpg": content(3)})
    (tmp_path / "a.txt").write_text("tags of mine")
    captioner, errors = FakeCaptioner(), tmp_path / "errors.jsonl"
    tally = run_once(found, output_settings(None), folders=[tmp_path], captioner=captioner, errors=errors)
    assert (tmp_path / "a.txt").read_text() == "tags of mine"
    assert (tally.done, tally.failed) == (1, 2)
    assert captioner.asked == [content(2)], "known before it is computed"
    first, second = lines(errors)
    assert first["code"] == second["code"] == "no_place"
    assert "a.txt is there already: --overwrite replaces it, --caption-suffix names another" in first["message"]
    assert f"b.txt is the caption of {tmp_path / 'b.png'}" in second["message"]
    found = files(tmp_path, {"a.png": content(1)})
    run_once(found, output_settings(None, overwrite=True), folders=[tmp_path], retry_failed=True)
    assert (tmp_path / "a.txt").read_text() == caption_of(content(1)) + "\n"


def test_a_picture_is_known_by_where_it_is_however_that_is_written(tmp_path, monkeypatch):
    (absolute,) = files(tmp_path / "in", {"a.png": content(1)})
    monkeypatch.chdir(tmp_path)
    relative = MediumItem(
        id="in/a.png", signature=absolute.signature, read=absolute.read, path=Path("in/a.png"), root=Path("in")
    )
    for output in (output_settings(None), output_settings(Path("out"))):
        captioner = FakeCaptioner()
        run_once([absolute], output, folders=[tmp_path], captioner=captioner)
        tally = run_once([relative], output, folders=[tmp_path], captioner=captioner)
        assert (len(captioner.asked), tally.skipped, tally.failed) == (1, 1, 0)
    (tmp_path / "elsewhere" / "out").mkdir(parents=True)
    mine = tmp_path / "elsewhere" / "out" / "a.txt"
    mine.write_text("mine")
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_once([absolute], output_settings(tmp_path / "out"), restart=True)
    assert mine.read_text() == "mine"
    assert (tmp_path / "out" / "a.txt").exists()


def test_captions_without_a_place_are_told(tmp_path):
    found, errors = files(tmp_path, {"prompt.png": content(1)}), tmp_path / "errors.jsonl"
    found.append(item("https://example.com/cat.png", content(2)))
    run_once(found, output_settings(None), folders=[tmp_path], errors=errors)
    assert not (tmp_path / "prompt.txt").exists(), "it would be the folder's prompt"
    assert [line["code"] for line in lines(errors)] == ["no_place"] * 2
    assert "name an --output" in lines(errors)[1]["message"]


def test_names_that_are_no_text_and_names_as_long_as_can_be(tmp_path):
    odd = os.fsdecode(b"caf\xe9.png")
    long = "n" * 251 + ".png"
    found = files(tmp_path, {odd: content(1), long: content(2)})
    for output in (output_settings(None), output_settings(tmp_path / "out"), output_settings(tmp_path / "o.jsonl")):
        tally = run_once(found, output, folders=[tmp_path])
        assert (tally.failed, tally.done) == (0, 2)
        assert run_once(found, output, folders=[tmp_path]).skipped == 2
    assert (tmp_path / os.fsdecode(b"caf\xe9.txt")).read_text() == caption_of(content(1)) + "\n"
    assert (tmp_path / ("n" * 251 + ".txt")).exists()


def test_halves_of_characters_in_fields_and_answers(tmp_path):
    class Says(FakeCaptioner):
        async def ask(self, request):
            answer = await super().ask(request)
            answer["choices"][0]["message"]["content"] = "half \ud83d of it"
            return answer

    for name in ("out.jsonl", "out.parquet", "out-%05d.tar", "folder"):
        run_once([item("a\ud83d", content(1), title="cut \ud83d")], output_settings(tmp_path / name), captioner=Says())
        tally = run_once([item("a\ud83d", content(1), title="cut \ud83d")], output_settings(tmp_path / name))
        assert tally.skipped == 1


def test_a_caption_that_cannot_be_written_is_its_items_failure(tmp_path):
    found, errors = files(tmp_path, {"a.png": content(1), "b.png": content(2)}), tmp_path / "errors.jsonl"
    output = output_settings(tmp_path / "out")
    (tmp_path / "out").mkdir()
    blocked = MediumItem(
        id="below/c.png", signature="c", read=lambda: content(3), path=tmp_path / "sub" / "c.png", root=tmp_path
    )
    (tmp_path / "out" / "sub").write_text("a file where a folder is needed")
    tally = run_once([*found, blocked], output, errors=errors)
    assert (tally.done, tally.failed) == (2, 1)
    (line,) = lines(errors)
    assert line["code"] == "no_place"
    (tmp_path / "out" / "sub").unlink()
    tally = run_once([*found, blocked], output, errors=errors, retry_failed=True)
    assert (tally.skipped, tally.done, tally.failed) == (2, 1, 0)
    assert (tmp_path / "out" / "sub" / "c.txt").exists()


def test_a_folder_of_captions_mirrors_the_pictures_and_nothing_leads_out_of_it(tmp_path):
    found = [
        *files(tmp_path / "in", {"a.png": content(1), "below/b.png": content(2)}),
        item("shard.tar/../../../evil", content(3)),
        item("https://example.com/x/cat.png?size=2", content(4)),
    ]
    run_once(found, output_settings(tmp_path / "out", suffix=".json"))
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.json")}
    assert there == {"a.json", "below/b.json", "shard.tar/evil.json", "example.com/x/cat.json"}
    assert json.loads((tmp_path / "out" / "a.json").read_text())["caption"] == caption_of(content(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_batch_lines_go_out_in_openai_form(tmp_path):
    request = ChatRequest(messages=[{"role": "user", "content": [{"type": "image", "image": content(1)}]}])
    found = [
        RequestItem(id="one", signature="1", read=lambda: request, is_batch=True),
        RequestItem(id="two", signature="2", read=lambda: request, is_batch=True),
        RequestItem(id="plain", signature="3", read=lambda: request),
    ]
    captioner = FakeCaptioner()
    run_once(found, output_settings(tmp_path / "out.jsonl"), captioner=captioner)
    assert len(captioner.asked) == 1, "equal requests are answered once"
    by_id = {line.get("custom_id") or line["id"]: line for line in lines(tmp_path / "out.jsonl")}
    for name in ("one", "two"):
        line = by_id[name]
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        assert line["response"]["body"]["choices"][0]["message"]["content"] == caption_of(content(1))
    assert by_id["plain"]["caption"] == caption_of(content(1))


def test_a_line_that_wants_another_model_is_refused_as_by_the_server(tmp_path):
    ask = ChatRequest(messages=[{"role": "user", "content": [{"type": "image", "image": content(1)}]}])
    models = {"none": None, "empty": "", "right": FakeCaptioner.model, "wrong": "gpt-4o"}
    found = [
        RequestItem(id=name, signature=name, read=partial(replace, ask, model=model), is_batch=True)
        for name, model in models.items()
    ]
    errors = tmp_path / "errors.jsonl"
    tally = run_once(found, output_settings(tmp_path / "out.jsonl"), errors=errors)
    assert (tally.done + tally.reused, tally.failed) == (3, 1)
    [error] = lines(errors)
    assert (error["id"], error["code"]) == ("wrong", "model_not_found")
    assert error["message"] == "there is no model 'gpt-4o' here, only fake"


@pytest.mark.parametrize("name", ["out.csv", "out-%s.tar", "out-%05d-%05d.tar", "%05d/out.tar", "out-%05d.jsonl"])
def test_names_that_say_nothing(name):
    with pytest.raises(SettingsError, match="--output is"):
        choose_output(**output_settings(Path(name)))
