"""`vlmserve bench peers`: servers of OpenAI's API side by side, the same workloads in turns (A B A B)."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlmserve.commands.bench.load import LoadClient, Round
from vlmserve.commands.bench.peers_table import show
from vlmserve.commands.bench.peers_workloads import WORKLOADS, CountTokens, Workload, make_workload
from vlmserve.commands.bench.quiet import CpuWatch, server_pid, wait_until_quiet
from vlmserve.commands.client.chat_client import ServerError
from vlmserve.config.flags import CommandParser
from vlmserve.config.number_words import above_zero, positive
from vlmserve_common.errors import EngineError

_ABOUT = """\
Four workloads against servers that run already, of any make, in turns: one request at a time, many at a time, few
pictures asked about again and again, and text alone. Prints medians, and how many times as fast the first server is as
each other one, round by round. Answers are streamed, greedy and of full length where the server takes ignore_eos.

A machine that does other work is seen: the CPU time that neither the servers nor this command took is printed beside
the figures. Servers on this machine are found by their ports; the one that is not measured must be idle, too.
"""
_EPILOG = """\
examples:
  vlmserve bench peers --base-url http://127.0.0.1:8000 --base-url http://127.0.0.1:8001
  vlmserve bench peers --base-url http://127.0.0.1:8000 --label vlmserve \\
      --base-url http://127.0.0.1:8001 --label vllm --tokenizer ./checkpoint \\
      --rounds 4 --wait-quiet 60 --json peers.json
"""


@dataclass(kw_only=True)
class Peer:
    """One of the servers. pid: of its first process, where that is known. notes: what is to be said of it."""

    label: str
    client: LoadClient
    pid: int | None
    notes: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; prints tables, and with --json writes all figures. 1 where a request failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    args.salt = args.salt or secrets.token_hex(4)
    with ExitStack() as stack:
        peers = [_meet(args, number, stack) for number in range(len(args.base_url))]
        count = _counter(args.tokenizer)
        for peer in peers:
            _warm_up(peer, args, count)
        runs = _measure(peers, args, count)
        pids = {peer.label: peer.pid for peer in peers}
    works = {name: str(WORKLOADS[name].scaled(args.scale)) for name in args.workloads}
    summary = show([peer.label for peer in peers], works, runs)
    for peer in peers:
        for note in peer.notes:
            print(f"{peer.label}: {note}")
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("api_key", "json")}
        models = {peer.label: {"url": peer.client.url, "model": peer.client.model} for peer in peers}
        notes = {peer.label: peer.notes for peer in peers}
        whole = {"settings": settings, "servers": models, "pids": pids, "notes": notes, "runs": runs}
        Path(args.json).write_text(json.dumps(whole | {"summary": summary}, indent=2, default=str) + "\n")
    return int(any(run["failed"] for run in runs))


def _parser() -> CommandParser:
    parser = CommandParser(prog="vlmserve bench peers", description=_ABOUT, epilog=_EPILOG)
    text = "a server, http://host:port with or without /v1; give it once for each"
    parser.add_argument("--base-url", "--url", action="append", required=True, metavar="URL", help=text)
    text = "its name in the table, one for each server [default: A, B ...]"
    parser.add_argument("--label", action="append", metavar="NAME", help=text)
    text = "the model's name there, one for each server [default: the first it lists]"
    parser.add_argument("--model", action="append", metavar="NAME", help=text)
    parser.add_argument("--api-key", metavar="KEY", help="of all servers [env: VLMSERVE_API_KEY]")
    text = "the server's first process, one for each [default: found by the port, on this machine]"
    parser.add_argument("--server-pid", action="append", type=positive, metavar="PID", help=text)
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="of all servers [default: 2]")
    text = f"of {','.join(WORKLOADS)} [default: all]"
    parser.add_argument("--workloads", type=_workloads, default=tuple(WORKLOADS), metavar="NAME,...", help=text)
    text = "multiplies the number of requests [default: 1]"
    parser.add_argument("--scale", type=above_zero, default=1.0, metavar="X", help=text)
    parser.add_argument("--side", type=positive, default=448, metavar="N", help="of pictures, in pixels [default: 448]")
    text = "what pictures and texts are made from; the same again finds caches filled [default: drawn]"
    parser.add_argument("--salt", help=text)
    text = "checkpoint folder: texts have exactly as many tokens as they should; without it, about as many"
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help=text)
    text = "wait so long at the most before each run for others to be quiet [default: 0]"
    parser.add_argument("--wait-quiet", type=above_zero, default=0.0, metavar="SECONDS", help=text)
    text = "for a connection, and between two pieces of an answer [default: 900]"
    parser.add_argument("--timeout", type=above_zero, default=900.0, metavar="SECONDS", help=text)
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    return parser


def _check(parser: CommandParser, args: argparse.Namespace) -> None:
    """Ends the process where there is not one of each for each server."""
    count = len(args.base_url)
    for name in ("label", "model", "server_pid"):
        given = getattr(args, name)
        if given is not None and len(given) != count:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} is given {len(given)} times, and must be once for each --base-url, or left out")
    args.label = args.label or [chr(ord("A") + number) for number in range(count)]
    if len(set(args.label)) < count:
        parser.error("two servers have the same --label")


def _workloads(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
    return names


def _meet(args: argparse.Namespace, number: int, stack: ExitStack) -> Peer:
    url = args.base_url[number]
    client = LoadClient(
        url,
        api_key=args.api_key or os.environ.get("VLMSERVE_API_KEY"),
        model=args.model[number] if args.model else None,
        timeout_s=args.timeout,
        logprobs=False,  # costs time, and not every server has them
    )
    stack.enter_context(closing(client))
    pid = args.server_pid[number] if args.server_pid else server_pid(url)
    if pid is not None and not Path(f"/proc/{pid}").exists():
        raise EngineError(f"--server-pid is {pid}, and there is no such process")
    peer = Peer(label=args.label[number], client=client, pid=pid)
    print(f"{peer.label}: {client.model} at {client.url}, {f'process {pid}' if pid else 'process not known'}")
    return peer


def _counter(folder: Path | None) -> CountTokens | None:
    if folder is None:
        return None
    from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer

    tokenizer = load_text_tokenizer(folder)
    return lambda text: len(tokenizer.encode(text))


def _warm_up(peer: Peer, args: argparse.Namespace, count: CountTokens | None) -> None:
    """A picture and a text, so that nothing is cold; finds out whether ignore_eos is taken. Raises ServerError."""
    for pictures in (1, 0):
        work = Workload(requests=1, at_a_time=1, pictures=pictures, tokens_in=16, tokens_out=4)
        questions = make_workload(work, side=args.side, salt=f"{args.salt}/{peer.label}/{pictures}", count=count)
        try:
            peer.client.run(questions, work.tokens_out)
        except ServerError as refusal:
            if not peer.client.ignore_eos:
                raise
            peer.client.ignore_eos = False
            try:
                peer.client.run(questions, work.tokens_out)
            except ServerError:
                raise refusal from None
            peer.notes.append("ignore_eos is not taken, so answers may be shorter")


def _measure(peers: Sequence[Peer], args: argparse.Namespace, count: CountTokens | None) -> list[dict[str, Any]]:
    """The figures of each run, in order."""
    runs = []
    pids = {peer.pid for peer in peers if peer.pid is not None}
    # others can be told from the servers only where these are all known
    watched = pids if all(peer.pid is not None for peer in peers) else None
    for number in range(args.rounds):
        for name in args.workloads:
            work = WORKLOADS[name].scaled(args.scale)
            for peer in peers:
                print(f"round {number + 1} of {args.rounds}: {name}, {peer.label} ...", file=sys.stderr)
                # of a salt of its own: servers may share a cache on disk
                salt = f"{args.salt}/{number}/{name}/{peer.label}"
                questions = make_workload(work, side=args.side, salt=salt, count=count)
                if watched is not None:
                    wait_until_quiet(watched, args.wait_quiet)
                watch = CpuWatch(watched) if watched is not None else None
                figures: dict[str, Any] = {"round": number, "workload": name, "label": peer.label, **asdict(work)}
                try:
                    done = peer.client.run(questions, work.tokens_out, at_a_time=work.at_a_time)
                    figures |= run_figures(done, work)
                except ServerError as error:
                    figures |= {"answered": 0, "failed": work.requests, "failures": [str(error)]}
                if watch is not None:
                    servers, figures["others_cores"] = watch.cores()
                    figures["idle_servers_cores"] = sum(used for pid, used in servers.items() if pid != peer.pid)
                runs.append(figures)
    return runs


def run_figures(done: Round, work: Workload) -> dict[str, Any]:
    """Of one workload at one server; times in seconds, medians of its requests."""
    answers = done.timings
    figures: dict[str, Any] = {
        "answered": len(answers),
        "failed": len(done.failures),
        "failures": list(dict.fromkeys(done.failures)),
        "short": sum(one.tokens < work.tokens_out for one in answers),
        "seconds": done.wall_s,
        "prompt_tokens": statistics.median(one.prompt_tokens for one in answers),
        "ttft_s": statistics.median(one.ttft_s for one in answers),
        "tokens_per_s": done.tokens_per_s,
    }
    several = [one.per_token_s for one in answers if one.tokens > 1]
    if several:
        figures["tpot_s"] = statistics.median(several)
    if 0 < work.pictures < work.requests:  # the first questions show pictures that are new
        for key, part in (
            ("ttft_new_s", [one.ttft_s for one in answers if one.number < work.pictures]),
            ("ttft_seen_s", [one.ttft_s for one in answers if one.number >= work.pictures]),
        ):
            if part:
                figures[key] = statistics.median(part)
    return figures
