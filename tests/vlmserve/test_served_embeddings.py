"""Embeddings, rankings and scores over HTTP: OpenAI's client, and the forms of Cohere, Jina and vLLM."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from processors.fetch.embedder import Embedder
from tests.processors.clips import make_clip
from tests.tiny_adapters import with_adapter, write_adapter
from tests.vlmserve.documented import BY_ID, ask, checked
from tests.vlmserve.pooled_checkpoints import (
    INSTRUCTION,
    QUERY,
    WIDTH,
    States,
    embed_prompt,
    make_embedder,
    make_reranker,
    rerank_prompt,
)
from tests.vlmserve.reference import picture
from tests.vlmserve.server_process import ServerProcess, await_that, serving

A, B = picture(1, 96, 64), picture(2, 77, 131)


def png(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


URL_A = f"data:image/png;base64,{png(A)}"
PART_A = {"type": "image_url", "image_url": {"url": URL_A}}
NOT_A_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm8gcGljdHVyZQ=="}}
NO_PICTURE = {"content": [NOT_A_PICTURE]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@dataclass(frozen=True)
class Asked:
    """A server, clients of it, and what transformers says."""

    server: ServerProcess
    http: httpx.Client
    openai: openai.OpenAI
    reference: States

    def vectors(self, **body: Any) -> np.ndarray:
        answer = ask(self.http, "createEmbedding", json={"model": "tiny", **body})
        assert answer["object"] == "list", answer
        assert [one["index"] for one in answer["data"]] == [*range(len(answer["data"]))]
        return np.array([one["embedding"] for one in answer["data"]])

    def error(self, operation: str, **body: Any) -> dict[str, Any]:
        answer = ask(self.http, operation, json={"model": "tiny", **body})
        assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")
        return answer["error"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("embedder")
    model = make_embedder(folder / "model")
    yield from asked(folder, model)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("reranker")
    model = make_reranker(folder / "model", template=False)
    adapter = write_adapter(model, folder / "tuned", seed=1)
    yield from asked(folder, model, "--enable-lora", "--lora-paths", f"tuned={adapter}")


def asked(folder: Any, model: Any, *flags: str) -> Iterator[Asked]:
    with serving(folder / "run", *flags, model=model) as server, httpx.Client(timeout=60) as client:
        client.base_url = f"http://127.0.0.1:{server.port()}"  # type: ignore[assignment]
        yield Asked(server, client, server.client(), States(model))


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_the_openai_client(embedder: Asked) -> None:
    """Which asks for base64 unless it is told otherwise."""
    texts = ["a", "What is in the image?", "a"]
    want = [embedder.reference.vector(embed_prompt(one), dimensions=8) for one in texts]
    create = embedder.openai.embeddings.create
    reply = create(model="tiny", input=texts, dimensions=8)
    close([one.embedding for one in reply.data], want)
    ids = [len(embedder.reference.processor.tokenizer.encode(embed_prompt(one))) for one in texts]
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == ("tiny", sum(ids), sum(ids))
    close(create(model="tiny", input="a", dimensions=8, encoding_format="float").data[0].embedding, want[0])
    with pytest.raises(openai.BadRequestError, match="dimensions is 65; it must be between 1 and 64"):
        create(model="tiny", input="a", dimensions=65)
    with pytest.raises(openai.BadRequestError, match=r"makes embeddings \(POST /v1/embeddings\), and gives no answers"):
        embedder.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])


def test_the_client_that_samples_videos_by_questions(embedder: Asked) -> None:
    files = []
    for picture_ in (A, B):
        buffer = io.BytesIO()
        picture_.convert("RGB").save(buffer, "JPEG")
        files.append(buffer.getvalue())
    client = Embedder(f"{embedder.http.base_url}/v1", model=None, api_key=None, timeout_s=60)
    near = asyncio.run(client.nearness("a", files))
    urls = [f"data:image/jpeg;base64,{base64.b64encode(file).decode()}" for file in files]
    pictures = embedder.vectors(input=[{"image": url} for url in urls])
    [asked] = embedder.vectors(input="a", instruction="Retrieve images or text relevant to the user's query.")
    close(near, pictures @ asked)


@pytest.mark.slow
def test_a_server_asks_another_one_about_the_frames_of_a_clip(embedder: Asked, tmp_path: Path) -> None:
    """Which are decoded in its media processes, twice."""
    url = "data:video/mp4;base64," + base64.b64encode(make_clip(60)).decode()
    video = {"type": "video_url", "video_url": {"url": url}, "nframes": 8, "sampling": "question"}
    with serving(tmp_path / "run", "--embedder-url", f"{embedder.http.base_url}/v1") as server:
        content = [video, {"type": "text", "text": "When?"}]
        asked_ = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "return_mm_report": True}
        status, answer = server.post("v1/chat/completions", **asked_)
    assert status == 200, answer
    report = answer["mm_report"]["media"][0]["video"]
    assert (report["sampling"], report["fallback"], len(report["timestamps"])) == ("question", "", 8)
    assert len(report["nearest"]) == report["probes"] == 5, "its keyframes"


def test_langchain(embedder: Asked) -> None:
    client = OpenAIEmbeddings(
        model="tiny", base_url=f"{embedder.http.base_url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    close(client.embed_query("a"), embedder.reference.vector(embed_prompt("a")))
    assert np.shape(client.embed_documents(["a", "b"])) == (2, WIDTH)


def test_forms_of_an_input(embedder: Asked) -> None:
    encode, vector = embedder.reference.processor.tokenizer.encode, embedder.reference.vector
    ids = encode("Name a colour.")
    raw = vector("Name a colour.")
    close(embedder.vectors(input=ids), [raw])
    of_text, of_picture = vector(embed_prompt("a")), vector(embed_prompt(A), A)
    mixed = ["a", ids, {"text": "a"}, {"image": URL_A}, {"image": png(A)}, {"content": [PART_A]}]
    close(embedder.vectors(input=mixed), [of_text, raw, of_text, of_picture, of_picture, of_picture])
    close(embedder.vectors(input={"image": URL_A}), [of_picture])
    both = {"content": [text("What is this? "), PART_A]}
    close(embedder.vectors(input=[both]), [vector(embed_prompt("What is this? ", A), A)])


def test_messages(embedder: Asked) -> None:
    vector, user = embedder.reference.vector, {"role": "user", "content": [PART_A, text("a")]}
    want = vector(embed_prompt(A, "a"), A)
    close(embedder.vectors(messages=[user]), [want])
    told = {"role": "system", "content": INSTRUCTION}
    close(embedder.vectors(messages=[told, user], add_generation_prompt=True, add_special_tokens=True), [want])
    close(embedder.vectors(messages=[user], instruction=QUERY), [vector(embed_prompt(A, "a", instruction=QUERY), A)])
    short = embed_prompt(A, "a").removesuffix("<|im_start|>assistant\n")
    close(embedder.vectors(messages=[user], add_generation_prompt=False), [vector(short, A)])


def test_instructions_and_their_names(embedder: Asked) -> None:
    want = embedder.reference.vector(embed_prompt("a", instruction=QUERY))
    for asked_by in ({"instruction": QUERY}, {"task": "query"}, {"task": "retrieval.query"}):
        close(embedder.vectors(input="a", **asked_by), [want])
    close(embedder.vectors(input="a", task="classification"), [embedder.reference.vector(embed_prompt("a"))])
    [row] = embedder.vectors(input="a", normalize=False)
    close(row / np.linalg.norm(row), embedder.reference.vector(embed_prompt("a")))
    assert abs(np.linalg.norm(row) - 1) > 0.1


def test_cohere(embedder: Asked) -> None:
    def embed(**body: Any) -> dict[str, Any]:
        answer = ask(embedder.http, "createCohereEmbedding", json={"model": "tiny", **body})
        assert "error" not in answer, answer
        return answer

    vector = embedder.reference.vector
    query = embed(texts=["a"], input_type="search_query", output_dimension=16)
    close(query["embeddings"]["float"], [vector(embed_prompt("a", instruction=QUERY), dimensions=16)])
    answer = embed(inputs=[{"content": [PART_A, text("a")]}, {"content": [text("b")]}], embedding_types=["float"])
    close(answer["embeddings"]["float"], [vector(embed_prompt(A, "a"), A), vector(embed_prompt("b"))])
    answer = embed(images=[URL_A], embedding_types=["float", "ubinary", "binary", "base64"])["embeddings"]
    [row], bits = answer["float"], np.array(answer["ubinary"][0], dtype=np.uint8)
    assert np.unpackbits(bits).tolist() == [int(one > 0) for one in row]
    assert answer["binary"] == [[int(one) - 128 for one in bits]]
    close(np.frombuffer(base64.b64decode(answer["base64"][0]), "<f4"), row)


def test_long_inputs(embedder: Asked) -> None:
    ids = embedder.reference.processor.tokenizer.encode("Count the shapes and name their colours. " * 3)
    long = "Count the shapes. " * 2000
    vector = embedder.reference.vector
    decode = embedder.reference.processor.tokenizer.decode
    close(embedder.vectors(input=ids, truncate_prompt_tokens=9), [vector(decode(ids[-9:]))])
    close(embedder.vectors(input=ids, truncate_prompt_tokens=9, truncation_side="right"), [vector(decode(ids[:9]))])
    answer = ask(embedder.http, "createEmbedding", json={"input": long, "truncate_prompt_tokens": 64})
    assert answer["usage"]["prompt_tokens"] == 64
    states = embedder.reference.states(embed_prompt(A, "a long text"), A)
    messages = [{"role": "user", "content": [PART_A, text("a long text")]}]
    keep = len(states) - 10  # a token sees only those before it
    cut = embedder.vectors(messages=messages, truncate_prompt_tokens=keep, truncation_side="right")
    close(cut, [states[keep - 1] / np.linalg.norm(states[keep - 1])])
    body = {"messages": messages, "truncate_prompt_tokens": 30, "truncation_side": "right"}
    assert "last picture or video ends" in embedder.error("createEmbedding", **body)["message"]
    error = embedder.error("createEmbedding", input=["a", long])
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param", "complaint"),
    [
        ({}, None, "needs either an input or messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, None, "needs either an input or messages"),
        ({"input": ""}, "input", "the text is empty"),
        ({"input": ["a", "", "b"]}, "input[1]", "input[1]: the text is empty"),
        ({"input": []}, "input", "input"),
        ({"input": [[]]}, "input[0]", "input[0]"),
        ({"input": 7}, "input", "input is 7; it must be text, token ids, or an object"),
        ({"input": [None]}, "input[0]", "input[0] is null; it must be text, token ids, or an object"),
        ({"input": ["a", -1]}, "input[1]", "input[1] is -1; it must be text"),
        ({"input": [5, 10**6]}, "input", "token id 1000000"),
        ({"input": [{"text": "a", "image": URL_A}]}, "input[0]", "needs one of text, image, video and content"),
        ({"input": ["a", {"image": "bm8gcGljdHVyZQ=="}]}, "input[1]", "input[1]: "),
        ({"input": ["a", NO_PICTURE]}, "input[1]", "input[1]: "),
        ({"input": ["a", {"image": "https://127.0.0.1:1/x.png"}]}, "input[1]", "input[1]: "),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and 64"),
        (
            {"messages": [{"role": "user", "content": [NOT_A_PICTURE]}]},
            "messages[0].content[0]",
            "messages[0].content[0]",
        ),
        ({"input": ["a", "<|image_pad|>"]}, "input[1]", "input[1] contains '<|image_pad|>'"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "truncate_prompt_tokens": -7}, "truncate_prompt_tokens", "-1, or 1 or more"),
        ({"input": ["a"] * 5000}, "input", "5000 items in input, the limit is 4096 (setting --max-items-per-request)"),
        ({"input": "a", "model": "other"}, "model", "there is no model 'other'"),
    ],
)
def test_bad_inputs(embedder: Asked, body: dict[str, Any], param: str | None, complaint: str) -> None:
    error = embedder.error("createEmbedding", **body)
    assert complaint in error["message"]
    assert param is None or param in (error["param"] or "")


def test_many_inputs_and_many_clients(embedder: Asked) -> None:
    """Beyond what the server takes at a time; good requests beside bad ones."""
    words = ["red", "blue", "green", "three", "circles", "square"]
    texts = [" ".join(words[(at + k) % 6] for k in range(at % 5 + 1)) for at in range(600)]
    want = {one: embedder.reference.vector(embed_prompt(one), dimensions=8) for one in set(texts)}
    with ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(embedder.vectors, input=texts, dimensions=8) for _ in range(2)]
        bad = pool.submit(embedder.error, "createEmbedding", input=[*texts[:300], ""])
        pictures = pool.submit(embedder.vectors, input=[{"image": URL_A}] * 20)
        assert bad.result()["param"] == "input[300]"
        assert np.ptp(pictures.result(), axis=0).max() == 0  # whatever is computed beside
        for one in whole:
            close(one.result(), [want[said] for said in texts])


def test_a_batch_of_embeddings(embedder: Asked) -> None:
    lines = [
        {"custom_id": said, "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny", "input": said}}
        for said in ("a", "b")
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = embedder.openai.files.create(file=("in.jsonl", content), purpose="batch")
    batch = embedder.openai.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        batch = embedder.openai.batches.retrieve(batch.id)
    assert batch.output_file_id, batch
    answers = map(json.loads, embedder.openai.files.content(batch.output_file_id).text.splitlines())
    found = {one["custom_id"]: one["response"]["body"]["data"][0]["embedding"] for one in answers}
    close([found["a"], found["b"]], [embedder.reference.vector(embed_prompt(said)) for said in ("a", "b")])


# ---- rerankers


DOCUMENTS = ["A file is opened.", "three red circles", "x", "the answer is on the left side of the square"]


def test_rankings(reranker: Asked) -> None:
    want = [reranker.reference.score(rerank_prompt(("red?",), (one,))) for one in DOCUMENTS]
    order = np.argsort(want)[::-1].tolist()
    body = {"model": "tiny", "query": "red?", "documents": DOCUMENTS}
    for operation in ("createRanking", "createCohereRanking", "createJinaRanking"):
        answer = ask(reranker.http, operation, json=body)
        assert [one["index"] for one in answer["results"]] == order
        close([one["relevance_score"] for one in answer["results"]], [want[at] for at in order])
        assert "document" not in answer["results"][0]
    objects = [{"text": one} for one in DOCUMENTS]
    shown = ask(
        reranker.http, "createRanking", json={**body, "documents": objects, "top_n": 2, "return_documents": True}
    )
    assert [one["document"]["text"] for one in shown["results"]] == [DOCUMENTS[at] for at in order[:2]]
    told = reranker.reference.score(rerank_prompt(("red?",), ("x",), QUERY))
    for name in ("instruct", "instruction"):
        answer = ask(reranker.http, "createRanking", json={**body, "documents": ["x"], name: QUERY})
        close(answer["results"][0]["relevance_score"], told)
    cut = ask(reranker.http, "createRanking", json={**body, "documents": ["x" * 50], "max_tokens_per_doc": 1})
    close(cut["results"][0]["relevance_score"], want[2])


def test_rankings_by_an_adapter(reranker: Asked, tmp_path: Path) -> None:
    model = tmp_path / "with"
    shown = reranker.http.get("/v1/models").json()["data"]
    adapter = Path(next(one["root"] for one in shown if one["id"] == "tuned"))
    reference = States(with_adapter(adapter.parent / "model", adapter, model))
    want = [reference.score(rerank_prompt(("red?",), (one,))) for one in DOCUMENTS]
    for body in ({"model": "tuned"}, {"model": "tiny", "lora_path": "tuned"}):
        answer = ask(reranker.http, "createPairScores", json={**body, "text_1": "red?", "text_2": DOCUMENTS})
        close([one["score"] for one in answer["data"]], want)
        assert answer["model"] == "tuned"


def test_an_adapter_whose_name_goes_while_it_ranks(reranker: Asked) -> None:
    root = next(one["root"] for one in reranker.http.get("/v1/models").json()["data"] if one["id"] == "tuned")
    assert reranker.http.post("/v1/load_lora_adapter", json={"lora_name": "brief", "lora_path": root}).is_success
    assert reranker.http.post("/pause_generation", json={"mode": "in_place"}).is_success
    bodies = {
        "/v1/rerank": {"model": "brief", "query": "red?", "documents": DOCUMENTS},
        "/v1/score": {"model": "brief", "text_1": "red?", "text_2": DOCUMENTS},
    }
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(reranker.http.post, path, json=body) for path, body in bodies.items()]
        await_that(lambda: reranker.http.get("/server_info").json()["num_pending"] == 2 * len(DOCUMENTS))
        assert reranker.http.post("/v1/unload_lora_adapter", json={"lora_name": "brief"}).is_success
        assert reranker.http.post("/continue_generation").is_success
        assert [one.result().json().get("model") for one in answers] == ["brief", "brief"]


def test_documents_of_pictures(reranker: Asked) -> None:
    score = reranker.reference.score
    documents = [{"image": URL_A}, {"content": [text("like this: "), PART_A]}, "a"]
    want = [score(rerank_prompt(("red?",), parts), A) for parts in ((A,), ("like this: ", A))]
    body = {"query": "red?", "documents": documents, "return_documents": True}
    answer = ask(reranker.http, "createRanking", json=body)
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    close([found[0], found[1]], want)
    assert {one["index"]: one["document"] for one in answer["results"]}[0] == {"image": URL_A}
    answer = ask(
        reranker.http, "createPairScores", json={"text_1": {"content": [PART_A]}, "text_2": [{"image": png(B)}]}
    )
    close(answer["data"][0]["score"], score(rerank_prompt((A,), (B,)), A, B))


def test_scores_of_pairs(reranker: Asked) -> None:
    want = [reranker.reference.score(rerank_prompt(("red?",), (one,))) for one in DOCUMENTS]
    for operation in ("createScore", "createPairScores"):
        for first in ("red?", ["red?"] * len(DOCUMENTS)):
            answer = ask(reranker.http, operation, json={"model": "tiny", "text_1": first, "text_2": DOCUMENTS})
            assert [one["index"] for one in answer["data"]] == [*range(len(DOCUMENTS))]
            close([one["score"] for one in answer["data"]], want)
    assert "between" not in reranker.error("createScore", text_1=["a", "b"], text_2=["a", "b", "c"])["message"]


@pytest.mark.parametrize(
    ("operation", "body", "param", "complaint"),
    [
        ("createRanking", {"query": "a", "documents": []}, "documents", "documents"),
        ("createRanking", {"documents": ["a"]}, "query", "query"),
        ("createRanking", {"query": "a", "documents": [7]}, "documents[0]", "must be text, or an object"),
        ("createRanking", {"query": "a", "documents": ["a", ""]}, "documents[1]", "the text is empty"),
        ("createRanking", {"query": "", "documents": ["a"]}, "query", "the text is empty"),
        ("createRanking", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "top_n"),
        ("createRanking", {"query": "a", "documents": ["a", "b " * 3000]}, "documents[1]", "the prompt has"),
        (
            "createRanking",
            {"query": "a", "documents": ["a", NO_PICTURE]},
            "documents[1]",
            "documents[1]",
        ),
        (
            "createRanking",
            {"query": NO_PICTURE, "documents": ["a"]},
            "query or documents[0]",
            "query",
        ),
        ("createScore", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "text_1 has 2 entries and text_2 1"),
        ("createScore", {"text_1": [], "text_2": ["a"]}, "text_1", "text_1"),
        ("createEmbedding", {"input": "a"}, None, "scores documents (POST /v1/rerank or /v1/score)"),
        ("createCompletion", {"prompt": "a"}, None, "and gives no answers"),
    ],
)
def test_bad_pairs(reranker: Asked, operation: str, body: dict[str, Any], param: str | None, complaint: str) -> None:
    error = reranker.error(operation, **body)
    assert complaint in error["message"]
    assert error["param"] == param or (param or "") in (error["param"] or "")
    assert checked(BY_ID["createRanking"], reranker.http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}))
