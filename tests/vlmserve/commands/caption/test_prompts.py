"""What is asked: templates, prompt.txt, and whose word counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmserve.commands.batch.item import MediumItem
from vlmserve.commands.caption.prompts import Prompts
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError


def at(path: Path, root: Path, **given) -> MediumItem:
    return MediumItem(id=str(path), signature="1", read=bytes, path=path, root=root, **given)


def medium(**fields) -> MediumItem:
    return MediumItem(id="a", signature="1", read=bytes, fields=fields)


def test_fields_are_put_in():
    template = "Describe this {{ kind }}{% if tags %}, tagged {{ tags | join(', ') }}{% endif %}."
    prompts = Prompts(template, prefix="{{ kind }}: ", suffix=" ({{ kind | upper }})")
    asked = prompts.ask(medium(kind="cat", tags=["soft", "grey"]))
    assert asked.prompt == "Describe this cat, tagged soft, grey."
    assert asked.whole("Sleeps.") == "cat: Sleeps. (CAT)"
    assert prompts.ask(medium(kind="dog", tags=[])).prompt == "Describe this dog."


def test_what_is_not_there_is_told_with_what_is():
    with pytest.raises(BadRequestError, match="the prompt is empty"):
        Prompts("{{ text }}").ask(medium(text=" "))
    with pytest.raises(BadRequestError, match=r"needs what is not there: 'colour' is undefined; its fields: id, kind"):
        Prompts("A {{ colour }} {{ kind }}").ask(medium(kind="cat", id="a"))


@pytest.mark.parametrize("name", ["prompt", "prefix", "suffix"])
def test_no_template(name):
    given = {"prompt": "x", "prefix": "", "suffix": "", name: "{% if %}"}
    with pytest.raises(SettingsError, match=rf"--{name} '\{{% if %\}}' is no Jinja2 template"):
        Prompts(given["prompt"], prefix=given["prefix"], suffix=given["suffix"])


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ id.__init__.__globals__ }}", "{{ 1 // 0 }}"])
def test_templates_of_strangers_get_nowhere(template):
    with pytest.raises(BadRequestError, match="cannot be filled in"):
        Prompts("{{ id }}").ask(MediumItem(id="a", signature="1", read=bytes, fields={"id": "a"}, prompt=template))


def test_the_nearest_prompt_counts(tmp_path):
    prompts = Prompts("from the command line")
    deep = tmp_path / "root" / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "prompt.txt").write_text("outside of what was named")
    picture = at(deep / "x.png", tmp_path / "root")
    assert prompts.ask(picture).prompt == "from the command line"
    (tmp_path / "root" / "prompt.txt").write_text("from the root\n")
    assert Prompts("from the command line").ask(picture).prompt == "from the root"
    (tmp_path / "root" / "a" / "prompt.txt").write_text("\ufefffrom a: {{ kind }}", encoding="utf-8")
    nearer = Prompts("from the command line")
    assert nearer.ask(at(deep / "x.png", tmp_path / "root", fields={"kind": "cat"})).prompt == "from a: cat"
    assert nearer.ask(at(tmp_path / "root" / "y.png", tmp_path / "root")).prompt == "from the root"
    assert nearer.ask(at(deep / "x.png", tmp_path / "root", prompt="its own")).prompt == "its own"


@pytest.mark.parametrize(("data", "told"), [(b"\xff\xfe", "is not UTF-8"), (b"x" * (2**20 + 1), "more than 1048576")])
def test_a_bad_prompt_file_fails_its_pictures(tmp_path, data, told):
    (tmp_path / "prompt.txt").write_bytes(data)
    with pytest.raises(BadRequestError, match=told):
        Prompts("x").ask(at(tmp_path / "x.png", tmp_path))
