"""Weights that change while a server serves, from every place that they may come from, and memory that is given back.

Each answer shows which checkpoint it was computed with.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.nasty_media import encoded, picture
from tests.tiny_adapters import write_adapter
from tests.tiny_checkpoints import make_checkpoint, write_safetensors
from tests.vlmserve.server_process import ROOT, ServerProcess, await_that, media_part, serving
from tests.vlmserve.trainer import tensors_of
from vlmserve import LLM
from vlmserve.engine.weights import memory
from vlmserve_common.errors import CheckpointError, EngineError

VERSIONS = ("one", "two", "three")
TOKENS = 12
GROUP = "trainers"
QUESTIONS = {
    "text": "What is in the image? Count the shapes.",
    "picture": [media_part("image", encoded(picture(56, 84), "PNG")), {"type": "text", "text": "Describe this."}],
}
FLAGS = ("--dtype", "float32", "--enable-sleep-mode")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("versions")
    return {name: make_checkpoint("qwen3_vl", top / name, seed=seed) for seed, name in enumerate(VERSIONS)}


@pytest.fixture(scope="module")
def answers(folders: dict[str, Path]) -> dict[str, dict[str, str]]:
    """The text of each version's answer to each question. All are different."""
    found = {}
    for name, folder in folders.items():
        with LLM(folder, dtype="float32", num_threads=1, max_total_tokens=4096) as llm:
            chats = {key: [{"role": "user", "content": content}] for key, content in QUESTIONS.items()}
            found[name] = {
                key: llm.chat(chat, max_tokens=TOKENS, temperature=0, ignore_eos=True).text
                for key, chat in chats.items()
            }
    assert all(len({found[name][key] for name in VERSIONS}) == len(VERSIONS) for key in QUESTIONS)
    return found


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With every cache there is. A test leaves it with the first version, and nothing paused."""
    top = tmp_path_factory.mktemp("server")
    caches = ["--enable-hierarchical-cache", "--hicache-size-gib", "0.01", "--page-size", "4"]
    caches += ["--hicache-storage-dir", str(top / "kv"), "--embedding-cache-dir", str(top / "embeddings")]
    with serving(top / "run", *FLAGS, *caches, model=folders["one"]) as process:
        yield process


def ask(server: ServerProcess, key: str, **more: Any) -> tuple[int, Any]:
    body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return server.post("v1/chat/completions", messages=[{"role": "user", "content": QUESTIONS[key]}], **body | more)


def text(server: ServerProcess, key: str, **more: Any) -> str:
    status, answer = ask(server, key, **more)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def said(server: ServerProcess, **more: Any) -> dict[str, str]:
    return {key: text(server, key, **more) for key in QUESTIONS}


def change(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    status, answer = server.post(path, **body)
    assert status == 200, answer
    assert answer["success"]
    return answer


def from_disk(server: ServerProcess, folder: Path, **more: Any) -> dict[str, Any]:
    return change(server, "update_weights_from_disk", model_path=str(folder), weight_version=folder.name, **more)


def version(server: ServerProcess) -> str:
    return json.loads(server.get("get_weight_version")[1])["weight_version"]


def refused(server: ServerProcess, path: str, **body: Any) -> str:
    status, answer = server.post(path, **body)
    assert status == 400, answer
    return answer["error"]["message"]


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"load_format": "safetensors", "serialized_named_tensors": [base64.b64encode(save(tensors)).decode()]}


class Trainer:
    """A process that a server's group meets."""

    def __init__(self, servers: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.size = 1 + servers
        words = [sys.executable, "-m", "tests.vlmserve.trainer", str(self.port), str(self.size), GROUP]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]

    def join(self, server: ServerProcess) -> None:
        meeting = {"master_address": "127.0.0.1", "master_port": self.port, "rank_offset": 1, "world_size": self.size}
        change(server, "init_weights_update_group", **meeting, group_name=GROUP, backend="gloo")
        assert self.process.stdout.readline() == "joined\n"

    def send(self, server: ServerProcess, folder: Path, *most: int, **more: Any) -> tuple[int, Any]:
        described = tensors_of(folder)
        body = more | {
            "names": list(described),
            "dtypes": ["float32"] * len(described),
            "shapes": [list(one.shape) for one in described.values()],
        }
        with ThreadPoolExecutor(1) as pool:
            path = "update_weights_from_distributed"
            reply = pool.submit(server.post, path, **body, group_name=GROUP, weight_version=folder.name)
            self.process.stdin.write(" ".join(map(str, (folder, *most))) + "\n")
            self.process.stdin.flush()
            return reply.result()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def training(server: ServerProcess, servers: int = 1) -> Iterator[Trainer]:
    trainer = Trainer(servers)
    try:
        trainer.join(server)
        yield trainer
    finally:
        trainer.end()
        server.post("destroy_weights_update_group", group_name=GROUP)


def test_what_was_cached_under_other_weights_is_never_used(server, folders, answers):
    for name in ("one", "two", "one", "three", "one"):
        if name != version(server):
            assert from_disk(server, folders[name])["weight_version"] == version(server) == name
        assert said(server) == answers[name]
        assert said(server) == answers[name], "from the caches, too"


def test_a_part_of_the_tensors(server, folders, answers):
    """The picture's answer depends on both parts, that of the text on one."""
    tensors = tensors_of(folders["two"])
    tower = {name: one for name, one in tensors.items() if ".visual." in name}
    rest = {name: one for name, one in tensors.items() if name not in tower}
    change(server, "update_weights_from_tensor", **as_bytes(rest))
    assert text(server, "text") == answers["two"]["text"]
    assert text(server, "picture") not in [answers[name]["picture"] for name in VERSIONS]
    change(server, "update_weights_from_tensor", **as_bytes(tower), weight_version="both")
    assert (said(server), version(server)) == (answers["two"], "both")
    from_disk(server, folders["one"])


def test_tensors_in_shared_memory(server, folders, answers):
    tensors, places, at = tensors_of(folders["three"]), [], 0
    box = shared_memory.SharedMemory(create=True, size=sum(one.nbytes + 64 for one in tensors.values()))
    try:
        for name, one in tensors.items():
            box.buf[at : at + one.nbytes] = one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            places.append({"name": name, "dtype": "float32", "shape": list(one.shape), "offset": at})
            at += -(-one.nbytes // 64) * 64
        body = {"load_format": "shared_memory", "shared_memory": {"name": box.name, "size": box.size}}
        change(server, "update_weights_from_tensor", **body, tensors=places)
        assert said(server) == answers["three"]
        beyond = [{**places[0], "offset": 1 << 30}]
        assert "is to be bytes" in refused(server, "update_weights_from_tensor", **body, tensors=beyond)
    finally:
        box.close()
        box.unlink()
    from_disk(server, folders["one"])


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_what_does_not_fit_changes_nothing(server, folders, answers, tmp_path):
    tensors = tensors_of(folders["two"])
    name = list(tensors)[-1]
    wrong = {
        "missing": {key: one for key, one in tensors.items() if key != name},
        "wrong shape": tensors | {name: torch.zeros(3)},
        "another dtype": tensors | {name: tensors[name].half()},
        "unexpected": tensors | {"model.layers.9.weight": torch.zeros(3)},
    }
    for said_why, content in wrong.items():
        folder = tmp_path / said_why.replace(" ", "-")
        folder.mkdir()
        write_safetensors(folder, content, 3)
        assert said_why in refused(server, "update_weights_from_disk", model_path=str(folder))
        if said_why != "missing":
            assert said_why in refused(server, "update_weights_from_tensor", **as_bytes(content))
    last = max(folder.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-100])
    assert "truncated" in refused(server, "update_weights_from_disk", model_path=str(folder))
    assert "model.safetensors" in refused(server, "update_weights_from_disk", model_path=str(tmp_path / "none"))
    trap = base64.b64encode(pickle.dumps(Marker(tmp_path / "ran"))).decode()
    for load_format in (None, "flattened_bucket", "direct", "safetensors"):
        refused(server, "update_weights_from_tensor", load_format=load_format, serialized_named_tensors=[trap])
    assert not (tmp_path / "ran").exists()
    assert (said(server), version(server)) == (answers["one"], "one")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_that_are_paused_go_on_with_the_new_weights(server, folders, answers, mode):
    """What they leave in the caches is found by nobody."""
    with ThreadPoolExecutor(1) as pool:
        enough = generated(server) + 2 * TOKENS
        running = pool.submit(text, server, "picture", max_tokens=900)
        await_that(lambda: generated(server) > enough)
        server.post("pause_generation", mode=mode)
        assert from_disk(server, folders["two"])["num_paused_requests"] == 1
        server.post("continue_generation")
        going_on = running.result()
    assert going_on.startswith(answers["one"]["picture"])
    assert said(server) == answers["two"]
    assert going_on != text(server, "picture", max_tokens=900)
    from_disk(server, folders["one"])
    assert going_on != text(server, "picture", max_tokens=900)


def rss(server: ServerProcess, name: str = "scheduler") -> int:
    """The memory of a process, in bytes."""
    status = Path(f"/proc/{server.processes()[name]}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


@pytest.mark.timeout(300)
def test_a_trainer_s_loop_under_load(server, folders, answers):
    """Fifty updates: no answer mixes two versions, what begins after an update is of the new one, memory stays."""
    versions = {value: name for name, texts in answers.items() for value in texts.values()}
    serving_now = (0, "one")  # after how many updates; no name while one is under way
    ended, found, mixed = threading.Event(), list[str](), list[Any]()

    def load(key: str) -> None:
        while not ended.is_set():
            before = serving_now
            status, answer = ask(server, key)
            if status == 499:  # paused
                continue
            said_now = answer["choices"][0]["message"]["content"]
            found.append(key)
            if said_now != answers.get(versions.get(said_now, ""), {}).get(key):
                mixed.append((key, said_now))
            elif before == serving_now and before[1] not in ("", versions[said_now]):
                mixed.append((key, said_now, before))

    with training(server) as trainer, ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(load, key) for key in QUESTIONS]
        sizes = []
        try:
            for number in range(1, 51):
                pauses, name = number % 5 == 0, VERSIONS[number % 3]
                if pauses:
                    assert server.post("pause_generation")[0] == 200
                serving_now = (number, "")
                assert trainer.send(server, folders[name])[0] == 200
                serving_now = (number, name)
                if pauses:
                    assert server.post("continue_generation")[0] == 200
                enough = len(found) + 3
                while len(found) < enough and not mixed:
                    time.sleep(0.01)
                sizes.append(rss(server))
        finally:
            ended.set()
        for client in clients:
            client.result()
    assert not mixed
    assert min(map(found.count, QUESTIONS)) > 40
    assert max(sizes[-10:]) < 1.05 * max(sizes[:10])
    from_disk(server, folders["one"])


def test_a_trainer_that_dies_leaves_the_old_weights(server, folders, answers):
    with training(server) as trainer:
        status, answer = trainer.send(server, folders["two"], 20)
        assert status >= 400
        assert "20 of" in answer["error"]["message"]
        assert said(server) == answers["one"]
    assert "there is no group" in refused(server, "destroy_weights_update_group", group_name=GROUP)
    with training(server) as trainer:
        wrong = {"names": ["nothing"], "dtypes": ["float32"], "shapes": [[2]], "group_name": GROUP}
        assert "unexpected" in refused(server, "update_weights_from_distributed", **wrong)
        assert trainer.send(server, folders["two"])[0] == 200
    assert said(server) == answers["two"]
    from_disk(server, folders["one"])


def roll_out(server: ServerProcess, **sampling: Any) -> dict[str, Any]:
    """As slime asks."""
    params = {"temperature": 0, "top_k": -1, "stop": None, "skip_special_tokens": False, "ignore_eos": True}
    params |= {"no_stop_trim": True, "spaces_between_special_tokens": False}
    ids = server.post("tokenize", prompt=QUESTIONS["text"])[1]["tokens"]
    status, answer = server.post("generate", input_ids=ids, sampling_params=params | sampling, return_logprob=True)
    assert status == 200, answer
    return answer


def test_the_calls_of_public_trainers(server, folders, answers):
    """Paths, bodies and their order are slime's and verl's; only tensors come by a group in place of pickles."""
    assert server.get("health_generate")[0] == 200
    assert server.get("flush_cache")[0] == 200
    with training(server) as trainer:
        # beside the trainer's devices
        assert server.post("pause_generation")[0] == 200
        assert server.get("flush_cache")[0] == 200
        assert trainer.send(server, folders["two"], flush_cache=False)[0] == 200
        assert server.post("continue_generation")[0] == 200
        assert version(server) == "two"
        assert said(server) == answers["two"]
        # on the same devices: memory is given back, and comes again in two parts
        assert server.get("flush_cache")[0] == 200
        change(server, "release_memory_occupation")
        change(server, "resume_memory_occupation", tags=["weights"])
        assert server.post("pause_generation")[0] == 200
        assert trainer.send(server, folders["one"], flush_cache=False)[0] == 200
        assert server.post("continue_generation")[0] == 200
        change(server, "resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
        assert (version(server), said(server)) == ("one", answers["one"])
    for tags in (None, ["kv_cache", "weights"]):
        change(server, "release_memory_occupation", tags=tags)
        change(server, "resume_memory_occupation", tags=tags)
    with ThreadPoolExecutor(1) as pool:
        enough = generated(server) + TOKENS
        running = pool.submit(roll_out, server, max_new_tokens=900)
        await_that(lambda: generated(server) > enough)
        status, answer = server.post("abort_request", rid="", abort_all=True)
        assert (status, len(answer["aborted"])) == (200, 1)
        part = running.result()
        assert part["meta_info"]["finish_reason"]["type"] == "abort"
        assert part["meta_info"]["weight_version"] == "one"
        assert TOKENS <= len(part["output_ids"]) < 900
    assert server.post("abort_request", rid="")[0] == 400
    whole = roll_out(server, max_new_tokens=TOKENS)
    assert whole["output_ids"] == part["output_ids"][:TOKENS]
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}
    logprobs = whole["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == whole["output_ids"]
    assert all(logprob <= 0 for logprob, _, _ in logprobs)
    assert said(server) == answers["one"]


def generated(server: ServerProcess) -> int:
    return json.loads(server.get("server_info")[1])["scheduler"]["generation_tokens_total"]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_requests_under_way_when_generation_is_paused(server, mode):
    wanted = text(server, "picture", max_tokens=900)
    with ThreadPoolExecutor(2) as pool:
        enough = generated(server) + 2 * TOKENS
        running = pool.submit(ask, server, "picture", max_tokens=900)
        await_that(lambda: generated(server) > enough)
        state = server.post("pause_generation", mode=mode)[1]
        counts = {"in_place": (1, 0), "retract": (0, 1), "abort": (0, 0)}[mode]
        assert (state["num_running_reqs"], state["num_waiting_reqs"]) == counts
        if mode == "retract":
            assert server.post("flush_cache")[0] == 200, "they have no KV"
        late = pool.submit(text, server, "text")
        time.sleep(0.1)
        assert running.done() == (mode == "abort")
        assert not late.done()
        assert server.post("continue_generation")[0] == 200
        status, answer = running.result()
        assert late.result()
    if mode == "abort":
        assert status == 499
    else:
        assert answer["choices"][0]["message"]["content"] == wanted
    assert server.post("pause_generation", mode="softly")[0] == 400


def test_memory_goes_back_to_the_system_and_comes_again(server, folders, answers):
    assert said(server) == answers["one"]
    full = rss(server)
    for path in ("release_memory_occupation", "sleep"):
        gone = change(server, path)["bytes"]
        assert gone > 2**20
        assert rss(server) < full - 0.9 * gone
        assert json.loads(server.get("is_sleeping")[1]) == {"is_sleeping": True}
        assert "resume it first" in refused(server, "update_weights_from_disk", model_path=str(folders["two"]))
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(text, server, "picture")
            time.sleep(0.1)
            change(server, "resume_memory_occupation", tags=["weights"])
            time.sleep(0.1)
            assert not waits.done()
            change(server, "resume_memory_occupation", tags=["kv_cache"])
            assert waits.result() == answers["one"]["picture"]
        assert said(server) == answers["one"]
    assert "weights" in refused(server, "release_memory_occupation", tags=["sofa"])


def test_forgotten_weights_have_to_come_before_anything_is_computed(server, folders, answers):
    change(server, "sleep?level=2")
    change(server, "wake_up")
    assert ask(server, "text")[0] == 503
    tensors = tensors_of(folders["two"])
    half = {name: one for number, (name, one) in enumerate(tensors.items()) if number % 2}
    change(server, "update_weights_from_tensor", **as_bytes(half))
    assert ask(server, "text")[0] == 503
    change(server, "update_weights_from_tensor", **as_bytes({key: tensors[key] for key in tensors.keys() - half}))
    assert said(server) == answers["two"]
    from_disk(server, folders["one"])


@pytest.mark.parametrize(
    ("flags", "processes"), [(("--tp-size", "2"), 2), (("--dp-size", "2"), 2), (("--pp-size", "2"), 2)]
)
def test_all_ranks_and_replicas_change_together(flags, processes, folders, answers, tmp_path):
    with serving(tmp_path, *FLAGS, *flags, model=folders["one"], OMP_NUM_THREADS="1") as server:
        with training(server, processes) as trainer:
            for name in ("two", "three"):
                assert trainer.send(server, folders[name])[0] == 200
                for salt in range(4):
                    assert said(server, cache_salt=str(salt)) == answers[name]
        assert change(server, "sleep")["bytes"] > 2**20
        change(server, "wake_up")
        assert said(server) == answers["three"]
        from_disk(server, folders["one"])
        assert said(server) == answers["one"]


def test_an_encoder_process_has_the_same_weights_when_it_starts_again(folders, answers, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    flags = (*FLAGS, "--encoder-dp-size", "1")
    with serving(tmp_path / "run", *flags, model=folders["one"], TMPDIR=str(temporary)) as server:
        assert said(server) == answers["one"]
        tensors = tensors_of(folders["two"])
        for number in range(2):  # each brings a part of the tower
            part = {name: one for at, (name, one) in enumerate(tensors.items()) if at % 2 == number}
            change(server, "update_weights_from_tensor", **as_bytes(part))
        assert said(server) == answers["two"]
        old = server.processes()["encoder-0"]
        os.kill(old, signal.SIGKILL)
        await_that(lambda: server.processes().get("encoder-0", old) != old)
        assert server.post("flush_cache")[0] == 200
        again = media_part("image", encoded(picture(56, 84), "PNG"), min_pixels=2 * 56 * 84)
        body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        found = []
        for name in ("two", "again"):
            if name == "again":
                from_disk(server, folders["two"])
            found.append(server.post("v1/chat/completions", messages=[{"role": "user", "content": [again]}], **body))
        assert found[0][1]["choices"] == found[1][1]["choices"]
    assert not [path for path in temporary.iterdir() if "tower" in path.name or "weights" in path.name]


def test_weights_that_cannot_come_again_are_not_forgotten(folders, tmp_path):
    adapter = write_adapter(folders["one"], tmp_path / "adapter", seed=1)
    options = {"lora_paths": str(adapter), "merge_lora": True, "max_total_tokens": 4096}
    with LLM(folders["one"], num_threads=1, **options) as llm:
        before = llm.chat("Hello", max_tokens=TOKENS, temperature=0).text
        with pytest.raises(CheckpointError, match="--merge-lora has added an adapter"):
            llm.weights.sleep(level=2)
        assert llm.chat("Hello", max_tokens=TOKENS, temperature=0).text == before
        llm.weights.sleep()
        llm.weights.wake_up()
        assert llm.chat("Hello", max_tokens=TOKENS, temperature=0).text == before


def test_memory_that_does_not_go_back_as_a_whole_is_taken_again(folders, answers, monkeypatch):
    with LLM(folders["one"], dtype="float32", num_threads=1, max_total_tokens=4096) as llm:
        give_back, calls = memory._give_back, []

        def fails_later(tensor: torch.Tensor) -> int:
            calls.append(tensor)
            if len(calls) > 20:
                raise EngineError("memory is not given back: error 12")
            tensor.zero_()
            return give_back(tensor)

        monkeypatch.setattr(memory, "_give_back", fails_later)
        with pytest.raises(CheckpointError, match="error 12"):
            llm.weights.sleep()
        chat = [{"role": "user", "content": QUESTIONS["text"]}]
        assert llm.chat(chat, max_tokens=TOKENS, temperature=0, ignore_eos=True).text == answers["one"]["text"]


def test_kept_weights_come_back_whole_however_little_is_read_at_once(folders, answers, monkeypatch):
    class Slow(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:
            return super().readinto(memoryview(buffer)[:1000])

    def opened(**_: Any) -> io.FileIO:
        return Slow(os.memfd_create("kept"), "r+")

    monkeypatch.setattr(memory.tempfile, "TemporaryFile", opened)
    with LLM(folders["one"], dtype="float32", num_threads=1, max_total_tokens=4096) as llm:
        llm.weights.sleep()
        llm.weights.wake_up()
        chat = [{"role": "user", "content": QUESTIONS["text"]}]
        assert llm.chat(chat, max_tokens=TOKENS, temperature=0, ignore_eos=True).text == answers["one"]["text"]


def test_an_engine_in_this_process(folders, answers):
    with LLM(folders["one"], dtype="float32", num_threads=1, max_total_tokens=4096) as llm:

        def said_here() -> dict[str, str]:
            options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            return {key: llm.chat([{"role": "user", "content": one}], **options).text for key, one in QUESTIONS.items()}

        assert said_here() == answers["one"]
        llm.weights.update_weights_from_disk(folders["two"])
        assert said_here() == answers["two"]
        llm.weights.update_weights_from_tensor(tensors_of(folders["three"]))
        assert said_here() == answers["three"]
        with pytest.raises(ValueError, match="level is 3; it must be 1"):
            llm.weights.sleep(3)
        llm.weights.sleep()
        with pytest.raises(ValueError, match="no tag 'sofa'"):
            llm.weights.wake_up(["sofa"])
        with pytest.raises(Exception, match="sleeps"):
            said_here()
        llm.weights.wake_up()
        assert said_here() == answers["three"]
        with pytest.raises(Exception, match="wrong shape"):
            llm.weights.update_weights_from_tensor({"model.language_model.norm.weight": torch.zeros(3)})
        assert said_here() == answers["three"]
