"""LoRA adapters: each request is answered as `transformers` does with the adapter in the weights, whatever runs
beside it and whatever was cached."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest
from safetensors.torch import load_file, save_file

from tests.fake_graphs import CallsAgain
from tests.tiny_adapters import with_adapter, write_adapter
from tests.tiny_checkpoints import HYBRID, MOE, make_checkpoint
from tests.vlmserve.executor.captured import capture_steps
from tests.vlmserve.reference import Reference, conversations
from tests.vlmserve.server_process import await_that, serving
from tests.vlmserve.test_served_parity import as_openai
from vlmserve import LLM, SamplingOverrides
from vlmserve_common.errors import CheckpointError, EngineError

NEW = 6
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
DECODER, TOWER = r"(?!.*visual).*", r".*visual.*"
ADAPTERS = {
    "decoder": {"modules": DECODER, "rank": 4},
    "tower": {"modules": TOWER, "rank": 3},
    # merged layers in part
    "holes": {"modules": r".*(q_proj|v_proj|gate_proj|down_proj|in_proj_z|in_proj_a|visual.*)", "rank": 8},
}


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    """A checkpoint, adapters for it, conversations, and the answers to them by adapter; None is the model alone."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(request.param, folder / "model")
    asked, adapters = conversations()[:4], {}
    answers = {None: [Reference(checkpoint).answer(messages, NEW).token_ids for messages in asked]}
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        adapters[name] = write_adapter(checkpoint, folder / name, seed=seed, **fields)
        reference = Reference(with_adapter(checkpoint, adapters[name], folder / f"with_{name}"))
        answers[name] = [reference.answer(messages, NEW).token_ids for messages in asked]
    return checkpoint, adapters, asked, answers


SETTINGS = [
    {},
    {"chunked_prefill_size": 16, "page_size": 4, "max_loras_per_batch": 2},
    {"cpu_kernels": "off", "disable_radix_cache": True},
    {"tp_size": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", MOE, HYBRID], indirect=True)
def test_requests_of_several_adapters_share_steps_and_nothing_else(family, settings):
    checkpoint, adapters, asked, answers = family
    with LLM(str(checkpoint), num_threads=1, enable_lora=True, max_total_tokens=4096, **settings) as llm:
        for name, folder in adapters.items():
            llm.load_lora_adapter(name, folder)
        mixed = [(name, number) for number in range(len(asked)) for name in answers]
        for _ in range(2):  # the second time from caches
            got = llm.chat_batch([asked[number] for _, number in mixed], GREEDY, loras=[name for name, _ in mixed])
            assert [list(one.token_ids) for one in got] == [answers[name][number] for name, number in mixed]


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_the_kernels_of_a_gpu_give_the_same_answers(family):
    checkpoint, adapters, asked, answers = family
    kernels = {"cpu_kernels": "off", "gpu_kernels": "triton"}
    with LLM(str(checkpoint), num_threads=1, enable_lora=True, max_total_tokens=2048, **kernels) as llm:
        for name, folder in adapters.items():
            llm.load_lora_adapter(name, folder)
        mixed = [(name, 0) for name in answers]

        def got(count):
            greedy = replace(GREEDY, max_new_tokens=count)
            made = llm.chat_batch([asked[number] for _, number in mixed], greedy, loras=[name for name, _ in mixed])
            return [list(one.token_ids) for one in made]

        wanted = [answers[name][number] for name, number in mixed]
        assert got(NEW) == wanted
        # the same by a captured step, which finds adapters by tables
        capturer = CallsAgain()
        capture_steps(llm, (len(mixed),), capturer, most_adapters=3)
        assert got(4) == [one[:4] for one in wanted]
        for name, folder in [*adapters.items()][::-1]:  # now they lie elsewhere
            llm.unload_lora_adapter(name)
            llm.load_lora_adapter(name, folder)
        assert got(2) == [one[:2] for one in wanted]
        assert capturer.replayed == 4


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_random_weights_take_adapters(family, tmp_path):
    checkpoint, adapters, asked, _ = family
    folder = shutil.copytree(checkpoint, tmp_path / "sizes", ignore=shutil.ignore_patterns("*.safetensors"))
    with LLM(str(folder), num_threads=1, load_format="dummy", enable_lora=True, max_total_tokens=1024) as llm:
        llm.load_lora_adapter("decoder", adapters["decoder"])
        alone, tuned = llm.chat_batch([asked[0]] * 2, GREEDY, loras=[None, "decoder"])
        assert alone.token_ids != tuned.token_ids


@pytest.mark.parametrize("family", [MOE], indirect=True)
def test_experts_that_ranks_share_among_them(family):
    checkpoint, adapters, asked, answers = family
    ranks = {"tp_size": 2, "ep_size": 2}
    with LLM(str(checkpoint), num_threads=1, enable_lora=True, max_total_tokens=4096, **ranks) as llm:
        for name, folder in adapters.items():
            llm.load_lora_adapter(name, folder)
        mixed = [(name, number) for number in range(len(asked)) for name in answers]
        got = llm.chat_batch([asked[number] for _, number in mixed], GREEDY, loras=[name for name, _ in mixed])
        assert [list(one.token_ids) for one in got] == [answers[name][number] for name, number in mixed]


@pytest.mark.parametrize("family", [MOE], indirect=True)
def test_an_adapter_can_be_merged_into_the_weights(family):
    checkpoint, adapters, asked, answers = family
    for name in ("decoder", "holes"):
        with LLM(str(checkpoint), num_threads=1, lora_paths=str(adapters[name]), merge_lora=True) as llm:
            assert [list(one.token_ids) for one in llm.chat_batch(asked, GREEDY)] == answers[name]


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_clients_choose_adapters_that_come_and_go_while_the_server_runs(family, tmp_path):
    checkpoint, adapters, asked, _ = family
    flags = ("--enable-lora", "--lora-paths", f"decoder={adapters['decoder']}", "--max-loaded-loras", "2")
    with serving(tmp_path, *flags, model=checkpoint) as server, server.client() as client:

        def ask(model, number, **more):
            options = {
                "max_tokens": NEW,
                "temperature": 0,
                "logprobs": True,
                "extra_body": {"ignore_eos": True, **more},
            }
            answer = client.chat.completions.create(model=model, messages=as_openai(asked[number]), **options)
            return answer.model, [entry.token for entry in answer.choices[0].logprobs.content]

        texts = {name: [ask(name or "tiny", number) for number in range(4)] for name in ("decoder", None)}
        assert texts["decoder"] != texts[None]
        # more than may be in memory: the one used longest ago goes, and comes back
        for name in ("tower", "holes"):
            status, body = server.post("v1/load_lora_adapter", lora_name=name, lora_path=str(adapters[name]))
            assert (status, body["success"]) == (200, True)
        listed = {model.id: model for model in client.models.list()}
        assert listed.keys() == {"tiny", *ADAPTERS}
        assert listed["holes"].parent == "tiny"
        with ThreadPoolExecutor(8) as pool:
            mixed = [(name, number) for number in range(4) for name in ("decoder", "tower", "holes", None)]
            got = list(pool.map(lambda pair: ask(pair[0] or "tiny", pair[1]), mixed))
        for (name, number), answer in zip(mixed, got, strict=True):
            assert answer[0] == (name or "tiny")
            assert name not in texts or answer == texts[name][number]
        assert ask("tiny", 1, lora_path="decoder") == texts["decoder"][1]
        status, answer = server.post(
            "v1/chat/completions", model="holes", lora_path="decoder", messages=as_openai(asked[1])
        )
        assert (status, answer["error"]["param"]) == (400, "lora_path")
        # under the same name another adapter: nothing of the old one is left
        server.post("v1/unload_lora_adapter", lora_name="decoder")
        with pytest.raises(openai.NotFoundError):
            ask("decoder", 0)
        server.post("v1/load_lora_adapter", lora_name="decoder", lora_path=str(adapters["tower"]))
        by_tower = {number: answer for (name, number), answer in zip(mixed, got, strict=True) if name == "tower"}
        assert [ask("decoder", number)[1] for number in range(4)] == [by_tower[number][1] for number in range(4)]
        for body, reason in (
            ({"lora_name": "tiny", "lora_path": str(adapters["tower"])}, "the model here is called"),
            ({"lora_name": "new", "lora_path": str(tmp_path / "none")}, "is no folder"),
            ({"lora_name": "new"}, "lora_path"),
        ):
            status, answer = server.post("v1/load_lora_adapter", **body)
            assert (status, reason in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_requests_that_run_end_with_the_adapter_that_is_unloaded(family, tmp_path):
    checkpoint, adapters, asked, _ = family
    with serving(tmp_path, "--enable-lora", model=checkpoint) as server, server.client() as client:
        server.post("v1/load_lora_adapter", lora_name="one", lora_path=str(adapters["decoder"]))
        options = {"max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}
        whole = client.chat.completions.create(model="one", messages=as_openai(asked[0]), **options)
        stream = client.chat.completions.create(model="one", messages=as_openai(asked[0]), stream=True, **options)
        text = next(iter(stream)).choices[0].delta.content or ""
        assert server.post("v1/unload_lora_adapter", lora_name="one")[0] == 200
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == whole.choices[0].message.content
        # also where the answer is written only when all is computed
        server.post("v1/load_lora_adapter", lora_name="two", lora_path=str(adapters["tower"]))
        server.post("pause_generation", mode="in_place")
        with ThreadPoolExecutor(1) as pool:
            scores = pool.submit(server.post, "v1/score", model="two", query="red?", labels=["yes", "no"])
            await_that(lambda: json.loads(server.get("server_info")[1])["num_pending"])
            assert server.post("v1/unload_lora_adapter", lora_name="two")[0] == 200
            server.post("continue_generation")
            status, answer = scores.result()
            assert (status, answer.get("model")) == (200, "two"), answer
        await_that(lambda: server.post("flush_cache")[0] == 200)


def doubled(adapter):
    """Add a layer of an adapter once more, by the name of a text-only model."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    again = {
        name.replace(".language_model.", "."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.0.self_attn.q_proj" in name
    }
    save_file(tensors | again, adapter / "adapter_model.safetensors")
    return adapter


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_an_adapter_that_does_not_fit_is_refused_by_what_does_not(family, tmp_path):
    checkpoint, adapters, asked, answers = family

    def made(name, **fields):
        return write_adapter(checkpoint, tmp_path / name, seed=9, **fields)

    def far(name):
        return re.sub(r"layers\.1\.", "layers.77.", name)

    with LLM(str(checkpoint), num_threads=1, enable_lora=True, max_lora_rank=8) as llm:
        for folder, reason in (
            (made("rank", rank=16), "its rank is 16, the limit is 8"),
            (made("other", r=8), "has factors of rank 4, and adapter_config.json says 8"),
            (made("dora", use_dora=True), "use_dora is True"),
            (made("bias", bias="all"), "bias is 'all'"),
            (made("saved", modules_to_save=["lm_head"]), "modules_to_save is ['lm_head']"),
            (made("kind", peft_type="IA3"), "peft_type is 'IA3'"),
            (made("pissa", init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
            (made("far", modules=DECODER, rename=far), "match nothing in this model: model.language_model.layers.77."),
            (doubled(made("twice", modules=DECODER)), "change the same weight"),
            (tmp_path / "none", "is no folder"),
            (tmp_path / ("long" * 100), "File name too long"),
        ):
            with pytest.raises(CheckpointError, match=re.escape(reason)):
                llm.load_lora_adapter("bad", folder)
        with pytest.raises(EngineError, match="no adapter 'bad'"):
            llm.unload_lora_adapter("bad")
        llm.load_lora_adapter("good", adapters["decoder"])
        assert list(llm.chat(asked[1], GREEDY, lora="good").token_ids) == answers["decoder"][1]
        # as a text-only sibling names its modules
        text_names = made("text", modules=DECODER, rename=lambda name: name.replace("model.language_model.", "model."))
        llm.load_lora_adapter("text", text_names)
        assert list(llm.chat(asked[1], GREEDY, lora="text").token_ids) != answers[None][1]
    with LLM(str(checkpoint), num_threads=1, enable_lora=True, lora_partial=True) as llm:
        llm.load_lora_adapter("far", tmp_path / "far")
        assert "adapter 'far': left out: " in llm.chat(asked[1], GREEDY, lora="far").warnings[0]
