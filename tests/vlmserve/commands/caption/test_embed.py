"""`vlmserve embed`: vectors in each form of output, and runs that go on where the last one ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.vlmserve.pooled_checkpoints import QUERY, WIDTH, States, embed_prompt, make_embedder
from tests.vlmserve.reference import picture
from tests.vlmserve.server_process import serving
from vlmserve import cli
from vlmserve.commands.caption.embed_remote import RemoteEmbedder
from vlmserve.commands.caption.outputs.vectors import vector_of

PICTURES = {name: picture(seed, 96, 64) for seed, name in enumerate(("a", "b", "c", "d", "e"))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def reference(model: Path) -> States:
    return States(model)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, image in PICTURES.items():
        image.save(folder / f"{name}.png")
    (folder / "prompt.txt").write_text("of captions, not of vectors")
    return folder


@pytest.fixture
def embed(model: Path, pictures: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs the command on the folder; returns its status."""

    def run(output: str, *flags: str) -> int:
        words = ["embed", str(model), str(pictures), "--output", f"{tmp_path}/{output}", "--num-threads", "1", *flags]
        return cli.main([*words, "--media-processes", "0"])

    return run


def close(got: Any, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=5e-4)


def test_a_table(embed, pictures, tmp_path, reference, capsys):
    assert embed("out/vectors.parquet", "--limit", "2") == 0
    assert "2 embedded" in capsys.readouterr().out
    (pictures / "f.png").write_bytes(b"no picture")
    PICTURES["a"].save(pictures / "same.png")
    assert embed("out/vectors.parquet", "--errors", f"{tmp_path}/errors.jsonl") == 3
    assert "4 embedded" in (said := capsys.readouterr().out)  # the same once more without the model
    assert "1 of them the same as others" in said
    table = pq.read_table(tmp_path / "out" / "vectors.parquet")
    assert str(table.schema.field("embedding").type) == f"fixed_size_list<element: halffloat>[{WIDTH}]"
    rows = {Path(row["id"]).stem: row for row in table.to_pylist()}
    assert rows.keys() == {*PICTURES, "same"}
    assert rows["same"]["embedding"] == rows["a"]["embedding"]
    for name, image in PICTURES.items():
        close(rows[name]["embedding"], reference.vector(embed_prompt(image), image))
    [error] = map(json.loads, (tmp_path / "errors.jsonl").read_text().splitlines())
    assert error["id"].endswith("f.png")
    assert embed("out/vectors.parquet", "--dimensions", "8") == 2
    assert "--dimensions was null, is 8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_ray_cluster_makes_the_same_vectors(embed, pictures, tmp_path):
    (pictures / "f.png").write_bytes(b"no picture")
    assert embed("there/vectors.jsonl", "--ray", "local", "--ray-actors", "1", "--ray-cpus", "0.5") == 3
    assert embed("here/vectors.jsonl") == 3
    here, there = (
        {row["id"]: row for row in map(json.loads, (tmp_path / side / "vectors.jsonl").read_text().splitlines())}
        for side in ("here", "there")
    )
    assert there.keys() == here.keys()
    assert len(there) == len(PICTURES)
    for name, row in there.items():
        close(row["embedding"], np.array(here[name]["embedding"]))


def test_matrices_in_parts(embed, tmp_path, reference):
    flags = ("--items-per-file", "2", "--dimensions", "8", "--instruction", QUERY, "--prompt", "called {{ stem }}")
    assert embed("part-%02d.npy", *flags) == 0
    found = {}
    for part, rows in enumerate((2, 2, 1)):
        matrix = np.load(tmp_path / f"part-{part:02}.npy")
        ids = [json.loads(line) for line in (tmp_path / f"part-{part:02}.ids.jsonl").read_text().splitlines()]
        assert (matrix.dtype, matrix.shape, len(ids)) == (np.float16, (rows, 8), rows)
        found |= {Path(id_).stem: row for id_, row in zip(ids, matrix, strict=True)}
    for name, image in PICTURES.items():
        parts = (image, f"called {name}")
        close(found[name], reference.vector(embed_prompt(*parts, instruction=QUERY), *parts, dimensions=8))


def test_lines_and_files(embed, pictures, tmp_path, reference):
    want = {name: reference.vector(embed_prompt(image), image) for name, image in PICTURES.items()}
    assert embed("vectors.jsonl") == 0
    lines = map(json.loads, (tmp_path / "vectors.jsonl").read_text().splitlines())
    found = {Path(line["id"]).stem: line for line in lines}
    assert found.keys() == PICTURES.keys()
    assert embed("files/") == 0
    for name in PICTURES:
        array = np.load(tmp_path / "files" / f"{name}.npy")
        close(array, want[name])
        assert np.array_equal(np.array(found[name]["embedding"], np.float16), array)
    (tmp_path / "files" / "a.npy").unlink()
    assert embed("files/") == 0
    close(np.load(tmp_path / "files" / "a.npy"), want["a"])
    assert embed("files/", "--restart", "--limit", "1") == 0
    assert len([*(tmp_path / "files").glob("*.npy")]) == 1


def test_servers(embed, model, pictures, tmp_path, reference):
    flags = ("--instruction", QUERY, "--dimensions", "8", "--prompt", "{{ stem }}")
    with serving(tmp_path / "run", model=model) as server:
        (pictures / "f.png").write_bytes(b"no picture")
        words = ["embed", str(pictures), "--output", f"{tmp_path}/v.parquet", *flags, "--errors", f"{tmp_path}/e.jsonl"]
        assert cli.main([*words, "--base-url", f"http://127.0.0.1:{server.port()}/v1"]) == 3
    rows = {Path(row["id"]).stem: row for row in pq.read_table(tmp_path / "v.parquet").to_pylist()}
    for name, image in PICTURES.items():
        parts = (image, name)
        want = reference.vector(embed_prompt(*parts, instruction=QUERY), *parts, dimensions=8)
        close(rows[name]["embedding"], want)
    assert len((tmp_path / "e.jsonl").read_text().splitlines()) == 1


def test_answers_that_are_no_vectors():
    embedder = RemoteEmbedder(["http://a"], api_key=None, model="m", request_timeout_s=1, server_timeout_s=1)
    for body in ({}, None, {"data": []}, {"data": [{"embedding": "%%%%"}], "usage": {}}):
        assert "no embedding" in embedder.read(body, b"{}", 1).reason
    found = embedder.read({"data": [{"embedding": [0.5, 2]}], "usage": {"prompt_tokens": 3}}, b"", 1)
    assert vector_of(found).tolist() == [0.5, 2]


def test_nothing_to_embed(embed, pictures, tmp_path):
    for file in pictures.iterdir():
        file.unlink()
    assert embed("none.npy") == 0
    assert embed("none.parquet") == 0
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--output", "x.tar"], "it must end with .jsonl, .parquet or .npy, or be a folder"),
        ([], "--output is needed"),
        (["--output", "x.npy", "--dimensions", "0"], "--dimensions is 0; it must be 1 or more"),
        (["--output", "x.npy", "--limit", "0"], "--limit is 0; it must be 1 or more"),
        (["--output", "x.npy", "--num-captions", "2"], "there is no --num-captions"),
    ],
)
def test_wrong_command_lines(model, pictures, capsys, flags, complaint):
    try:
        status: Any = cli.main(["embed", str(model), str(pictures), *flags])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert complaint in capsys.readouterr().err


def test_dimensions_beyond_the_model_fail_each_item(embed, tmp_path):
    assert embed("x.npy", "--dimensions", "999", "--errors", f"{tmp_path}/errors.jsonl") == 3
    errors = [json.loads(line)["message"] for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert errors == [f"dimensions is 999; it must be between 1 and {WIDTH}"] * 5
