"""/v1/sessions: what the scheduler is asked for, what stays in a conversation, whose it is, its limits and its end."""

from __future__ import annotations

import http.client
import json
import threading
import time

import pytest
from PIL import Image

from tests.processors.helpers import encoded
from tests.vlmserve.api.fake_engine import BODY, MODEL, ids_of, png_url
from tests.vlmserve.api.test_files_in_chat import by_url, refused, upload
from vlmserve.ipc.messages import FinishReason

URL = "/v1/sessions"
CHAT = "/v1/chat/completions"
OPTIONS = {"max_tokens": 4, "temperature": 0}


def text(words):
    return {"type": "text", "text": words}


def picture(size=(56, 28)):
    return {"type": "image_url", "image_url": {"url": png_url(size=size)}}


class Session:
    def __init__(self, client, **fields):
        self.client = client
        answer = client.post(URL, json=fields)
        assert answer.status_code == 200, answer.text
        self.url = f"{URL}/{answer.json()['id']}"

    def post(self, what, **fields):
        return self.client.post(f"{self.url}/{what}", json=fields)

    def append(self, *content, **fields):
        answer = self.post("append", content=content[0] if isinstance(content[0], str) else list(content), **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, content=None, **fields):
        answer = self.post("ask", content=content, **OPTIONS, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    @property
    def state(self):
        return self.client.get(self.url).json()


def figure(client, name):
    [line] = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"vlmserve:{name}{{")]
    return float(line.rpartition(" ")[2])


def streamed(answer):
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(one)["choices"][0]["delta"].get("content", "") for one in events)


def test_a_conversation_in_pieces_is_that_of_one_request(client, served):
    """To the last token, and its media are the same."""
    session = Session(client, system="Be brief.")
    for piece in ([text("Look: "), picture()], [picture((28, 56)), text(" and")]):
        session.append(*piece)
    said = session.ask("What is this?")
    session.append(picture((84, 28)))
    assert session.ask([text("And this?"), picture((28, 84))]) != said
    in_pieces = served.scheduler.requests[-1]
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [text("Look: "), picture(), picture((28, 56)), text(" and"), text("What is this?")],
        },
        {"role": "assistant", "content": said},
        {"role": "user", "content": [picture((84, 28)), text("And this?"), picture((28, 84))]},
    ]
    assert client.post(CHAT, json={**BODY, "messages": messages}).status_code == 200
    whole = served.scheduler.requests[-1]
    assert ids_of(in_pieces) == ids_of(whole)
    assert [(one.digest, one.offsets) for one in in_pieces.mm_inputs.items] == [
        (one.digest, one.offsets) for one in whole.mm_inputs.items
    ]
    assert session.state["media"] == len(in_pieces.mm_inputs.items) == 4


def test_what_is_appended_is_computed_up_to_where_a_question_goes_on(client, served):
    session = Session(client)
    appended = session.append(text("Look: "), picture())
    [request] = served.scheduler.requests
    assert served.prompt.endswith("<|vision_end|>")
    assert request.sampling_params.max_new_tokens == 0
    assert appended["usage"] == {"prompt_tokens": len(ids_of(request)), "cached_tokens": len(ids_of(request)) // 2}
    assert appended["session"]["tokens"] == len(ids_of(request))
    session.ask("What?", keep=False)
    asked = served.scheduler.requests[-1]
    assert ids_of(asked)[: len(ids_of(request))] == ids_of(request)
    assert asked.session_id == request.session_id != ""


def test_what_is_kept(client, served):
    session = Session(client)
    session.append("One.")
    before = session.state
    session.ask("Two?", keep=False)
    streamed(session.post("ask", content="Two?", keep=False, stream=True, **OPTIONS))
    after = session.state
    assert (after["messages"], after["tokens"], after["bytes"]) == (1, before["tokens"], before["bytes"])
    said = session.ask("Two?")
    again = streamed(session.post("ask", content="Three?", stream=True, **OPTIONS))
    assert again
    assert session.state["messages"] == 4
    session.ask("Four?")
    assert [said in served.prompt, again in served.prompt, "Three?" in served.prompt] == [True] * 3
    assert session.state["tokens"] > before["tokens"]


def test_calls_and_their_results_are_kept(client, served):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    served.scheduler.say(f"I look.\n{call}")
    for stream in (False, True):
        session = Session(client, tools=[tool])
        asked = session.post("ask", content="Go", stream=stream, **{**OPTIONS, "max_tokens": 60})
        assert asked.status_code == 200, asked.text
        result = {"role": "tool", "tool_call_id": "call_1", "content": "seven"}
        answer = session.post("append", messages=[result])
        assert answer.status_code == 200, answer.text
        assert session.state["messages"] == 3
        session.post("ask", **OPTIONS)
        assert "I look." in served.prompt
        assert "seven" in served.prompt


def test_fields_of_the_session_are_those_of_its_requests(client, served):
    session = Session(client, mm_processor_kwargs={"min_pixels": 10_000}, cache_salt="mine")
    session.append(picture())
    large = served.scheduler.requests[-1].mm_inputs.items[0].grid_thw
    session.append(picture(), mm_processor_kwargs={"max_pixels": 784})
    first, second = (item.grid_thw for item in served.scheduler.requests[-1].mm_inputs.items)
    assert first == large != second
    session.ask("What?")
    assert served.scheduler.requests[-1].cache_salt == served.scheduler.requests[0].cache_salt == "0 mine"


def test_an_uploaded_file_is_read_when_it_is_appended(client, served):
    session = Session(client)
    file = upload(client, encoded(Image.new("RGB", (56, 56))), "x.png")
    session.append({"type": "file", "file": {"file_id": file}})
    assert client.delete(f"/v1/files/{file}").status_code == 200
    session.ask("What?")
    assert len(served.scheduler.requests[-1].mm_inputs.items) == 1


@pytest.mark.parametrize(
    ("what", "fields", "status", "param", "code"),
    [
        ("append", {}, 400, None, "invalid_value"),
        ("append", {"content": "a", "messages": [{"role": "user", "content": "a"}]}, 400, None, "invalid_value"),
        ("append", {"content": []}, 400, "content", "invalid_value"),
        ("append", {"content": [text("a"), by_url("data:image/png;base64,AAAA")]}, 400, "content[1]", "invalid_image"),
        ("append", {"content": [text("a"), text("<|image_pad|>")]}, 400, "content[1].text", None),
        ("append", {"content": "a " * 300}, 400, "content", "context_length_exceeded"),
        ("append", {"content": [picture()] * 3}, 400, "content", None),
        ("append", {"content": [picture()], "mm_processor_kwargs": {"fpss": 1}}, 400, "mm_processor_kwargs.fpss", None),
        ("append", {"messages": [{"role": "king", "content": "a"}]}, 400, "messages[0]", "invalid_value"),
        ("ask", {}, 400, "content", None),
        ("ask", {"content": "a", "n": 2}, 400, "n", "invalid_value"),
        ("ask", {"content": "a", "messages": []}, 400, "messages", "invalid_value"),
        ("ask", {"content": "a", "session_id": "b"}, 400, "session_id", "invalid_value"),
        ("ask", {"content": "a", "temperature": 9}, 400, "temperature", None),
        ("ask", {"content": "a", "model": "other"}, 404, "model", "model_not_found"),
        ("ask", {"content": [by_url("file:///etc/passwd")]}, 400, "content[0]", "invalid_media_url"),
    ],
)
def test_what_is_refused_changes_nothing(serve, what, fields, status, param, code):
    _served, client = serve(max_images_per_request=2)
    with client:
        session = Session(client)
        answer = session.post(what, **fields)
        if code is None:
            code = answer.json()["error"]["code"]
        refused(answer, status, param, code)
        if what == "ask":
            refused(session.post(what, stream=True, **fields), status, param, code)
        state = session.state
        assert (state["messages"], state["media"], state["bytes"]) == (0, 0, 0)


def test_a_failed_answer_is_not_kept(client, served):
    session = Session(client)
    session.append("One.")
    served.scheduler.fail_with = FinishReason(type="error", status=500, message="broken")
    assert session.post("append", content="Two").status_code == 500
    for stream in (False, True):
        assert session.post("ask", content="Two?", stream=stream, **OPTIONS).status_code == 500
    served.scheduler.fail_with = None
    assert session.state["messages"] == 1
    session.ask("Three?")
    assert "Two" not in served.prompt


def test_an_answer_that_fails_on_the_way_is_not_kept(client, served):
    session = Session(client)
    served.scheduler.pause_after = 2
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(session.post("ask", content="Two?", stream=True, **OPTIONS))
    )
    asking.start()
    served.scheduler.wait_until(lambda: served.scheduler.requests)
    time.sleep(0.2)  # its first words are under way
    client.post("/abort_request", json={"abort_all": True})
    asking.join()
    assert "request_aborted" in answers[0].text
    assert '"content"' in answers[0].text
    assert session.state["messages"] == 0


def test_a_session_belongs_to_its_key(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann\nbob key-of-bob\n")
    _served, client = serve(api_key_file=str(keys), max_open_sessions_per_key=2)
    with client:
        client.headers["Authorization"] = "Bearer key-of-ann"
        session = Session(client)
        assert len(client.get(URL).json()["data"]) == 1
        client.headers["Authorization"] = "Bearer key-of-bob"
        for answer in (
            client.get(session.url),
            client.delete(session.url),
            session.post("append", content="a"),
            session.post("ask", content="a"),
            session.post("ask", content="a", keep=False, stream=True),
        ):
            refused(answer, 404, None, "session_not_found")
        assert client.get(URL).json()["data"] == []
        Session(client), Session(client)
        refused(client.post(URL, json={}), 429, None, "too_many_sessions")
        client.headers["Authorization"] = "Bearer key-of-ann"
        Session(client)


def test_limits(serve):
    _served, client = serve(max_open_sessions=1, max_open_session_bytes=20_000, max_open_session_tokens=100)
    with client:
        session = Session(client, system="a")
        assert figure(client, "open_sessions") == 1
        assert figure(client, "open_session_bytes") == session.state["bytes"] > 0
        refused(client.post(URL, json={}), 429, None, "too_many_sessions")
        refused(session.post("append", content="a " * 120), 400, "content", "context_length_exceeded")
        session.append(picture())
        held = session.state["bytes"]
        answer = session.post("append", content=[picture((224, 224))])
        refused(answer, 429, None, "sessions_full")
        assert "20000" in answer.json()["error"]["message"]
        assert session.state["bytes"] == held
        assert client.delete(session.url).json()["deleted"]
        refused(client.delete(session.url), 404, None, "session_not_found")
        refused(client.post(URL, json={"ttl": 601}), 400, "ttl", "invalid_value")
        refused(client.post(URL, json={"system": "x" * 30_000}), 429, None, "sessions_full")
        assert client.get(URL).json()["data"] == []
        assert figure(client, "open_session_bytes") == 0
        Session(client)


def test_a_session_expires_when_nobody_uses_it(client, served):
    session = Session(client, ttl=0.3)
    served.scheduler.pause_after = 0
    done = []
    asking = threading.Thread(target=lambda: done.append(session.post("ask", content="Long?", **OPTIONS)))
    asking.start()
    served.scheduler.wait_until(lambda: served.scheduler.requests)
    time.sleep(0.5)
    assert client.get(session.url).status_code == 200, "it is in use"
    client.post("/abort_request", json={"abort_all": True})
    asking.join()
    assert done[0].status_code == 499
    while client.get(session.url).status_code == 200:
        time.sleep(0.02)
    refused(client.get(session.url), 404, None, "session_not_found")


def test_changes_come_in_turn_and_questions_that_leave_no_trace_do_not_wait(client, served):
    session = Session(client)
    session.append("One.")
    served.scheduler.pause_after = 1
    answers = {}

    def ask(name, **fields):
        answers[name] = session.post("ask", content=name, **OPTIONS, **fields)

    def append():
        answers["more"] = session.post("append", content="more")

    threads = [threading.Thread(target=ask, args=("kept",))]
    threads[0].start()
    served.scheduler.wait_until(lambda: len(served.scheduler.requests) == 2)
    threads += [threading.Thread(target=append), threading.Thread(target=ask, args=("free",), kwargs={"keep": False})]
    for thread in threads[1:]:
        thread.start()
    served.scheduler.wait_until(lambda: len(served.scheduler.requests) == 3)
    assert "free" in served.prompt
    assert "kept" not in served.prompt
    assert client.delete(session.url).json()["deleted"]
    served.scheduler.pause_after = None
    client.post("/abort_request", json={"abort_all": True})
    for thread in threads:
        thread.join()
    refused(answers["more"], 404, None, "session_not_found")
    assert len(served.scheduler.requests) == 3, "nothing is computed for a session that is gone"


def test_a_client_that_leaves_takes_its_question_with_it(served, port):
    served.scheduler.pause_after = 1
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = json.dumps({"content": "Long?", "stream": True, **OPTIONS})
    opened = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    opened.request("POST", URL, body="{}", headers={"Content-Type": "application/json"})
    session_id = json.loads(opened.getresponse().read())["id"]
    connection.request("POST", f"{URL}/{session_id}/ask", body=body, headers={"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read(10)
    connection.close()
    answer.close()
    served.scheduler.wait_until(lambda: served.scheduler.aborts)
    opened.request("GET", f"{URL}/{session_id}")
    assert json.loads(opened.getresponse().read())["messages"] == 0
    opened.close()


def test_requests_name_the_model(client):
    refused(client.post(URL, json={"model": "other"}), 404, "model", "model_not_found")
    assert Session(client, model=MODEL).state["model"] == MODEL
