"""`vlmserve embed`: vectors of pictures and videos, with the inputs, the journal and the error file of `caption`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import blake3

from vlmserve.commands.batch.command_line import add_media_settings, input_parser, run_checked
from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.command import CaptionCommand, add_flags, command_of, run_command
from vlmserve.commands.caption.local import LocalCaptioner
from vlmserve.commands.caption.outputs.vectors import OUTPUTS, as_text
from vlmserve.commands.caption.result import CaptionTally
from vlmserve.commands.caption.run import CaptionStopped
from vlmserve.commands.caption.session import Work
from vlmserve.config.checks import SettingsError
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.pooled import embed_fields
from vlmserve.frontend.requests import ChatPrompt, GenerateReqInput
from vlmserve.frontend.tasks import with_instruction
from vlmserve_common.errors import EngineError, EngineUnavailableError

_ABOUT = """\
Make vectors of pictures and videos: a few, or millions.

An INPUT is what `vlmserve caption` takes: a picture or video, a folder, a pattern in quotes, a URL, a list (.txt), a
.jsonl or .parquet file, a WebDataset .tar, a remote store, or "-". A line of a .jsonl file may be a conversation.

--output chooses the form: vectors.parquet or part-%05d.parquet (ids, and lists of float16), vectors.npy (a matrix of
float16, with vectors.ids.jsonl beside it), vectors.jsonl, or a folder/ with a .npy for each item.

Finished vectors are on disk, and noted in a journal beside the output. The same command, given again, continues a run
that ended for any reason. Identical pictures are computed once.
"""
_EPILOG = """\
examples:
  vlmserve embed Qwen/Qwen3-VL-Embedding-2B pictures/ --output vectors.parquet
  vlmserve embed ./checkpoint 'shards/*.tar' --output part-%05d.parquet --dimensions 512 --errors errors.jsonl
  vlmserve embed ./checkpoint products.parquet --output vectors.npy --prompt '{{ title }}'
  vlmserve embed pictures/ --output vectors.parquet --base-url http://a:8000/v1 --base-url http://b:8000/v1
  vlmserve embed ./checkpoint pictures/ --output vectors.parquet --ray head:6379

The exit status is 0 if all items have vectors, 3 if some failed, 1 if the run had to stop, 2 for a wrong command line,
130 if interrupted.
"""
_TAKEN = {
    *("output", "errors", "input_format", "media_column", "prompt_column", "id_column", "overwrite", "items_per_file"),
    *("journal", "restart", "retry_failed", "shard", "limit"),
    *("min_pixels", "max_pixels", "fps", "max_frames", "concurrency", "memory_gib", "json"),
    *("base_url", "api_key", "request_timeout_s", "server_timeout_s", "ray", "ray_actors", "ray_cpus"),
}


@dataclass(kw_only=True)
class VectorTally(CaptionTally):
    """The counts of a run that makes vectors."""

    verb: ClassVar[str] = "embedded"

    @property
    def work(self) -> int:
        return self.prompt_tokens


class LocalEmbedder(LocalCaptioner):
    """A `Captioner` that answers with vectors."""

    def __init__(self, settings: ServerSettings, **how: Any) -> None:
        super().__init__(settings, **how)
        task = self.llm.builder.limits.task  # which is read from files in folders, too
        self.identity += f" {blake3.blake3(repr(task).encode()).hexdigest(8)}"

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        """Return the vector as `make_vector_record` takes it. Raises as `Captioner.ask` does."""
        task, options = self.llm.builder.limits.task, request.options
        messages = with_instruction(request.messages, task, options.get("instruction"))
        wanted = GenerateReqInput(
            request_id=f"embd-{uuid.uuid4().hex}",
            prompt=ChatPrompt(messages=messages, add_special_tokens=True),
            mm_processor_kwargs=options.get("mm_processor_kwargs") or {},
            **embed_fields(task, dimensions=options.get("dimensions")),
        )
        try:
            [output] = [item.output async for item in self.llm.generate(wanted)]
        except EngineUnavailableError as error:
            raise CaptionStopped(str(error)) from None
        if output.hidden_states is None:
            raise EngineError("a request ended without a vector")
        usage = {"prompt_tokens": output.prompt_tokens}
        return {"embedding": as_text(output.hidden_states[0]), "model": self.model, "usage": usage}


def _maker(by_servers: bool) -> type[Any]:
    if by_servers:
        from vlmserve.commands.caption.embed_remote import RemoteEmbedder

        return RemoteEmbedder
    return LocalEmbedder


VECTORS = Work(name="embed", tally=VectorTally, outputs=OUTPUTS, maker=_maker, prompted=False)


def read_command(argv: Sequence[str]) -> CaptionCommand:
    """Read and check the command line. Raises SettingsError with a line for each problem."""
    parser = input_parser("embed", about=_ABOUT, epilog=_EPILOG, words="own_words")
    unset = add_flags(parser, _TAKEN)
    place = parser.add_argument_group("vectors")
    place.add_argument(
        "--prompt", dest="own_prompt", default="", metavar="TEXT", help="Jinja2 template of a text behind each picture"
    )
    place.add_argument("--instruction", metavar="TEXT", help="what the vectors are for; default: the checkpoint's own")
    place.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers of each vector")
    add_media_settings(
        parser,
        groups=("memory", "scheduling"),
        more={"attention_backend", "chat_template", "pooling", "tp_size", "pp_size"},
        left_out={"max_queued_requests", "max_pixels", "video_fps"},
    )
    args = {**unset, **vars(parser.parse_intermixed_args(argv))}
    asked = {name: value for name in ("instruction", "dimensions") if (value := args.pop(name)) is not None}
    if args["own_output"] is None:
        raise SettingsError("--output is needed: it says where the vectors go")
    if asked.get("dimensions", 1) < 1:
        raise SettingsError(f"--dimensions is {asked['dimensions']}; it must be 1 or more, or left out")
    command = command_of({**args, "own_caption_suffix": ".npy"}, task="embed")
    return replace(command, run=replace(command.run, options=asked))


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises VlmserveError or OSError if the run cannot begin."""
    return run_checked("embed", lambda: run_command(read_command(argv), VECTORS))
