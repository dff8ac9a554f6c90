"""The `vlmserve` command. Everything heavy is imported by the subcommand that needs it, so that --help is quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vlmserve.config.flags import GIVEN_AS, CommandParser, add_settings, in_the_users_words
from vlmserve.config.settings import load_settings
from vlmserve_common.errors import CheckpointError, SettingsError, VlmserveError
from vlmserve_common.installing import hf
from vlmserve_common.process.stop_signals import sigterm_exits
from vlmserve_common.version import __version__

USAGE_ERROR = 2
# Commands whose flags, --help too, are their own: words -> what --help says of it, and the module with a main(argv)
# that returns the exit status.
_BENCHES = {
    "serve": ("throughput and latency of a served model", "vlmserve.commands.bench.serve"),
    "peers": ("servers of any make side by side", "vlmserve.commands.bench.peers"),
    "caption": ("captions from files beside the engine alone", "vlmserve.commands.bench.caption"),
    "cluster": ("what a Ray cluster costs", "vlmserve.commands.bench.cluster"),
    "processors": ("throughput of picture and video files", "vlmserve.commands.bench.processors"),
    "audio": ("sounds to embeddings, beside transformers", "vlmserve.commands.bench.audio"),
    "vision": ("the vision encoder and its embedding cache", "vlmserve.commands.bench.vision"),
    "parallel": ("two processes that share a model beside one", "vlmserve.commands.bench.parallel"),
    "disaggregation": ("prompts on one server, answers on another one", "vlmserve.commands.bench.disaggregation"),
    "sched": ("what the scheduler itself costs", "vlmserve.commands.bench.sched"),
    "grammar": ("what a JSON schema costs", "vlmserve.commands.bench.grammar"),
    "lora": ("LoRA adapters beside none", "vlmserve.commands.bench.lora"),
    "pruning": ("pages without their exact repeats beside whole ones", "vlmserve.commands.bench.pruning"),
    "speculation": ("guessed tokens beside none", "vlmserve.commands.bench.speculation"),
    "live": ("live video: the cost of a second, of a question, of cameras", "vlmserve.commands.bench.live"),
    "api": ("what HTTP, template, tokenizer and detokenizer cost", "vlmserve.commands.bench.api"),
    "embeddings": ("embeddings beside transformers, and over HTTP", "vlmserve.commands.bench.embeddings"),
    "router": ("what a router adds to a request and to a token", "vlmserve.commands.bench.router"),
    "soak": ("does anything grow in a server over thousands of requests", "vlmserve.commands.bench.soak"),
    "gpu": ("the engine on one GPU, beside transformers", "vlmserve.commands.bench.gpu.command"),
    "loading": ("how much memory each rank of a model takes until it can compute", "vlmserve.commands.bench.loading"),
    "trace": ("where the device waits for the host, step by step", "vlmserve.commands.bench.trace"),
}
_TOOLS = {
    "router": ("one endpoint in front of many servers", "vlmserve.router.command"),
    "deploy": ("serve a model on a Ray cluster", "vlmserve.ray.service.deploy"),
    "plan": ("which models fit on this CPU or on GPUs, and how fast they can be", "vlmserve.commands.plan.command"),
    "verify": ("compare a model's answers with those of transformers", "vlmserve.commands.verify.command"),
    "cache": ("look at the embedding cache on disk, and clear it", "vlmserve.commands.cache"),
    "warmup": ("encode pictures and videos ahead of time", "vlmserve.commands.warmup.command"),
    "caption": ("caption pictures and videos by the million", "vlmserve.commands.caption.command"),
    "embed": ("vectors of pictures and videos by the million", "vlmserve.commands.caption.embed"),
    "demo": ("a page to chat with a model", "vlmserve.commands.demo.command"),
    "chat": ("chat with a model in the terminal", "vlmserve.commands.chat.command"),
    "watch": ("ask about a camera or a video as it plays", "vlmserve.commands.watch.command"),
    "doctor": ("what this machine and installation have, and lack", "vlmserve.commands.doctor.command"),
}

# Ollama's commands, and what to use in their place
_OLLAMAS = {
    "run": "vlmserve chat MODEL chats in the terminal, and vlmserve serve MODEL serves an API",
    "pull": "vlmserve serve MODEL downloads MODEL when it first starts, and {hf} download MODEL does so ahead of time",
    **dict.fromkeys(("list", "ls"), "{hf} cache ls lists the models that were downloaded"),
    "rm": "{hf} cache rm model/MODEL deletes a model that was downloaded",
}

_EPILOG = """\
examples:
  vlmserve serve                                     a small built-in model, to try things out
  vlmserve serve Qwen/Qwen3-VL-2B-Instruct           a model of the Hugging Face hub
  vlmserve serve ./checkpoint --port 9000 --dtype bfloat16
  vlmserve caption FOLDER --output captions.jsonl    caption pictures and videos
  vlmserve embed MODEL FOLDER --output OUT.parquet   make vectors of pictures and videos
  vlmserve warmup FOLDER --embedding-cache-dir DIR   encode pictures and videos ahead of time
  vlmserve plan                                      which models fit on this machine's CPU, and how fast
  vlmserve plan ./checkpoint --tp 8 --gpu h200       whether it fits, and how fast it can be at the best
  vlmserve verify Qwen/Qwen3-VL-2B-Instruct          compare its answers with those of transformers
  vlmserve bench serve --help                        measure it
  vlmserve demo                                      a page to chat with the built-in model
  vlmserve chat --ask "What is this?" picture.png    ask in the terminal; without --ask: chat there
  vlmserve watch /dev/video0 "Is anybody there?"     ask about a camera, or a file as it plays
  vlmserve doctor                                    what this machine and installation have, and lack
"""
_SERVE_ABOUT = """\
Serve a Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, Qwen4Exp or Omni checkpoint behind an OpenAI-compatible API.

Every setting is a flag, an environment variable and a key of the --config file; a flag wins over the variable,
the variable over the file, the file over the default:
  --page-size 16              VLMSERVE_PAGE_SIZE=16              page-size: 16
  --disable-radix-cache       VLMSERVE_DISABLE_RADIX_CACHE=1     disable-radix-cache: true
  --no-disable-radix-cache    VLMSERVE_DISABLE_RADIX_CACHE=0     disable-radix-cache: false

The usual flags of vLLM, SGLang and llama.cpp are taken, too, or answered with ours: docs/flags-of-others.md.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser. `serve` leaves flags that were not given out of its namespace."""
    parser = CommandParser(
        prog="vlmserve", description="Serve Qwen-VL models: pictures in, right answers out.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"vlmserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model behind an OpenAI-compatible API",
        description=_SERVE_ABOUT,
        usage="%(prog)s [MODEL] [options]",
    )
    serve.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        help="checkpoint folder, or a Hugging Face hub id; left out: a small built-in model",
    )
    add_settings(serve)
    bench = commands.add_parser("bench", help="measure a server", description="Benchmarks.")
    benches = bench.add_subparsers(dest="bench", metavar="BENCHMARK")
    for group, tools in ((benches, _BENCHES), (commands, _TOOLS)):
        for name, (about, _) in tools.items():
            group.add_parser(name, help=about, add_help=False)
    commands.add_parser("version", help="print the version")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status.

    0: success, 1: a failure, 2: a wrong command line, setting or checkpoint, 130: Ctrl-C.
    """
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130


def _main(words: list[str]) -> int:
    tools, named = (_BENCHES, words[1:]) if words[:1] == ["bench"] else (_TOOLS, words)
    if named and named[0] in tools:
        return _run_tool(tools[named[0]][1], named[1:])
    if words and words[0] in _OLLAMAS:
        return _complain(f"there is no command {words[0]!r}: {_OLLAMAS[words[0]].format(hf=hf())}", USAGE_ERROR)
    parser = build_parser()
    args = parser.parse_args(["--help"] if words == ["help"] else words)
    if args.command is None:
        parser.error("name a command; vlmserve --help lists them")
    if args.command == "bench":
        *names, last = _BENCHES
        parser.error(f"name a benchmark: {', '.join(names)} or {last}")
    if args.command == "version":
        print(f"vlmserve {__version__}")
        return 0
    return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    own = ("command", "config", "model_argument", GIVEN_AS)
    flags = {name: value for name, value in vars(args).items() if name not in own}
    if args.model_argument is not None:
        if flags.get("model", args.model_argument) != args.model_argument:
            return _complain(
                f"MODEL is {args.model_argument!r} but --model is {flags['model']!r}: give one", USAGE_ERROR
            )
        flags["model"] = args.model_argument
    try:
        settings = load_settings(flags, config=args.config)
    except SettingsError as error:
        given_as = getattr(args, GIVEN_AS, {})
        problems = [in_the_users_words(problem, given_as) for problem in str(error).splitlines()]
        return _complain("\n".join(problems), USAGE_ERROR)
    try:
        from vlmserve.api.launch import launch_server

        return launch_server(settings)
    except Exception as error:
        if settings.log_level == "debug" or not isinstance(error, (VlmserveError, OSError)):
            raise
        return _failed(error)


def _run_tool(module: str, words: list[str]) -> int:
    try:
        with sigterm_exits():
            status: int = importlib.import_module(module).main(words)
            return status
    except (VlmserveError, OSError) as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    """Complain of an error. What the user has to change is 2, so that nobody starts the same again; other failures are
    1."""
    return _complain(str(error), USAGE_ERROR if isinstance(error, SettingsError | CheckpointError) else 1)


def _complain(message: str, status: int) -> int:
    for line in message.splitlines():
        print(f"vlmserve: error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
