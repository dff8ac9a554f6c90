"""`vlmserve bench peers`: servers of OpenAI's API side by side, the same workloads in turns (A B A B)."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vlmserve.commands.bench.figures import Spread, bench_parser, write_json
from vlmserve.commands.bench.load import LoadClient, Round
from vlmserve.commands.bench.media import WORKLOADS, CountTokens, Workload, make_workload
from vlmserve.commands.bench.processes import LIMIT_CORES, CpuWatch, server_pid, wait_until_quiet
from vlmserve.commands.client.chat_client import ServerError
from vlmserve.config.fields import flag
from vlmserve.config.flags import CommandParser, above_zero, positive
from vlmserve_common.errors import EngineError

_ABOUT = """\
Four workloads against servers that run already, of any make, in turns: one request at a time, many at a time, few
pictures asked about again and again, and text alone. Prints medians, and how many times as fast the first server is as
each other one, round by round. Answers are streamed, greedy and of full length where the server takes ignore_eos.

Work of others on this machine is seen: the CPU time that neither the servers nor this command took is printed beside
the figures. Servers on this machine are found by their ports. The server that is not measured must be idle, too.
"""
_EPILOG = """\
examples:
  vlmserve bench peers --base-url http://127.0.0.1:8000 --base-url http://127.0.0.1:8001
  vlmserve bench peers --base-url http://127.0.0.1:8000 --label vlmserve \\
      --base-url http://127.0.0.1:8001 --label vllm --tokenizer ./checkpoint \\
      --rounds 4 --wait-quiet 60 --json peers.json
"""
_WIDTH = 34


class _Row(NamedTuple):
    """more_is_better: None where servers are not compared."""

    title: str
    scale: float
    form: str
    more_is_better: bool | None = False


_ROWS: Mapping[str, _Row] = {
    "ttft_s": _Row("first token, s", 1, ".3f"),
    "ttft_new_s": _Row("first token of a new picture, s", 1, ".3f"),
    "ttft_seen_s": _Row("first token of a seen picture, s", 1, ".3f"),
    "tpot_s": _Row("each further token, ms", 1000, ".1f"),
    "tokens_per_s": _Row("tokens/s", 1, ".1f", more_is_better=True),
    "batch": _Row("requests in a decode step", 1, ".1f", None),
    "encoding": _Row("encoding, % of the time", 100, ".0f", None),
    "prompts": _Row("prompts, %", 100, ".0f", None),
    "decoding": _Row("decoding, %", 100, ".0f", None),
    "neither": _Row("neither, %", 100, ".0f", None),
}


@dataclass(kw_only=True)
class Peer:
    """One of the servers. pid: its first process, None if not known. notes: what readers of its figures must know."""

    label: str
    client: LoadClient
    pid: int | None
    notes: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, print tables, and return 1 if a request failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    args.salt = args.salt or secrets.token_hex(4)
    with ExitStack() as stack:
        peers = [_connect(args, number, stack) for number in range(len(args.base_url))]
        count = _counter(args.tokenizer)
        for peer in peers:
            _warm_up(peer, args, count)
        runs = _measure(peers, args, count)
    works = {name: str(WORKLOADS[name].scaled(args.scale)) for name in args.workloads}
    summary = show_peers([peer.label for peer in peers], works, runs)
    for peer in peers:
        for note in peer.notes:
            print(f"{peer.label}: {note}")
    servers = {peer.label: {"url": peer.client.url, "model": peer.client.model} for peer in peers}
    pids = {peer.label: peer.pid for peer in peers}
    notes = {peer.label: peer.notes for peer in peers}
    write_json(args, {"servers": servers, "pids": pids, "notes": notes, "runs": runs, "summary": summary})
    return int(any(run["failed"] for run in runs))


def _parser() -> CommandParser:
    parser = bench_parser("peers", _ABOUT, epilog=_EPILOG)
    add = parser.add_argument
    text = "a server, http://host:port with or without /v1; give it once for each"
    add("--base-url", "--url", action="append", required=True, metavar="URL", help=text)
    add("--label", action="append", metavar="NAME", help="name in the table, one for each server (default: A, B ...)")
    text = "name of the model there, one for each server (default: the first that the server lists)"
    add("--model", action="append", metavar="NAME", help=text)
    add("--api-key", metavar="KEY", help="the key of all servers [env: VLMSERVE_API_KEY]")
    text = "first process of the server, one for each (default: found by the port, on this machine)"
    add("--server-pid", action="append", type=positive, metavar="PID", help=text)
    add("--rounds", type=positive, default=2, metavar="N", help="rounds over all servers")
    text = f"of {','.join(WORKLOADS)} (default: all)"
    add("--workloads", type=_workloads, default=tuple(WORKLOADS), metavar="NAME,...", help=text)
    add("--scale", type=above_zero, default=1.0, metavar="X", help="multiplies the number of requests")
    add("--side", type=positive, default=448, metavar="N", help="side of the pictures, in pixels")
    text = "what pictures and texts are made from; the same again finds caches filled (default: drawn)"
    add("--salt", help=text)
    text = "checkpoint folder whose tokenizer counts: texts have exactly the tokens they should, else about as many"
    add("--tokenizer", type=Path, metavar="DIR", help=text)
    text = "before each run, wait so long at the most until others leave the machine alone"
    add("--wait-quiet", type=above_zero, default=0.0, metavar="SECONDS", help=text)
    text = "limit for a connection, and between two pieces of an answer"
    add("--timeout", type=above_zero, default=900.0, metavar="SECONDS", help=text)
    return parser


def _check(parser: CommandParser, args: argparse.Namespace) -> None:
    """End the process unless each flag that names servers is given once for each server."""
    count = len(args.base_url)
    for name in ("label", "model", "server_pid"):
        given = getattr(args, name)
        if given is not None and len(given) != count:
            parser.error(f"{flag(name)} is given {len(given)} times, and must be once for each --base-url, or left out")
    args.label = args.label or [chr(ord("A") + number) for number in range(count)]
    if len(set(args.label)) < count:
        parser.error("two servers have the same --label")


def _workloads(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
    return names


def _connect(args: argparse.Namespace, number: int, stack: ExitStack) -> Peer:
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
    """Ask about a picture and a text, and find out whether the server takes ignore_eos. Raises ServerError."""
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
    runs = []
    pids = {peer.pid for peer in peers if peer.pid is not None}
    # other processes can be told from the servers only if all servers are known
    watched = pids if all(peer.pid is not None for peer in peers) else None
    for number in range(args.rounds):
        for name in args.workloads:
            work = WORKLOADS[name].scaled(args.scale)
            for peer in peers:
                print(f"round {number + 1} of {args.rounds}: {name}, {peer.label} ...", file=sys.stderr)
                salt = f"{args.salt}/{number}/{name}/{peer.label}"  # of its own: servers may share a cache on disk
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
    """Return the figures of one workload at one server; times in seconds, medians over the requests."""
    answers = done.answers
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
    if done.work is not None:
        figures |= {"batch": done.work.batch, **done.work.shares}
    parts = {"tpot_s": [one.per_token_s for one in answers if one.tokens > 1]}
    if 0 < work.pictures < work.requests:  # the first questions show pictures that are new
        parts["ttft_new_s"] = [one.ttft_s for one in answers if one.number < work.pictures]
        parts["ttft_seen_s"] = [one.ttft_s for one in answers if one.number >= work.pictures]
    return figures | {name: statistics.median(part) for name, part in parts.items() if part}


def show_peers(labels: Sequence[str], works: Mapping[str, str], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print a table for each workload, and return its medians, and the ratios of the first server to each other one.

    labels: of the servers. works: the description of each workload.
    """
    first, *rest = labels
    summary: dict[str, Any] = {}
    for name, what in works.items():
        print(f"\n{name}: {what}")
        _print_row("", [*labels, *(f"{first} beside {label}" for label in rest)])
        mine = {label: [run for run in runs if (run["workload"], run["label"]) == (name, label)] for label in labels}
        summary[name] = {}
        for key, row in _ROWS.items():
            values = {label: [run[key] for run in mine[label] if key in run] for label in labels}
            if not any(values.values()):
                continue
            medians = {label: Spread.of(each) if each else None for label, each in values.items()}
            faster = {label: _ratios(mine[first], mine[label], key, row) for label in rest}
            summary[name][key] = {
                part: {label: spread and asdict(spread) for label, spread in found.items()}
                for part, found in (("medians", medians), ("ratios", faster))
            }
            cells = [Spread.of(each, row.scale).shown(row.form) if each else "-" for each in values.values()]
            _print_row(row.title, cells + [str(ratio or "-") for ratio in faster.values()])
        _print_about(mine)
    return summary


def _ratios(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], key: str, row: _Row) -> Spread | None:
    """Return how many times as fast we are, round by round, where both sides have the figure."""
    if row.more_is_better is None:
        return None
    pairs = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) if key in a and key in b]
    return Spread.of([a / b if row.more_is_better else b / a for a, b in pairs]) if pairs else None


def _print_row(title: str, cells: Sequence[str]) -> None:
    print(f"  {title}".ljust(_WIDTH) + "".join(cell.rjust(28) for cell in cells))


def _print_about(mine: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Print how quiet the machine was, the length of prompts as the servers count it, and what went wrong."""

    def values(key: str) -> list[list[float]]:
        return [[run[key] for run in several if key in run] for several in mine.values()]

    others = [Spread.of(each).shown(".2f") if each else "not known" for each in values("others_cores")]
    _print_row("CPU taken by others, cores", others)
    prompts = ["/".join(sorted({f"{tokens:g}" for tokens in each})) or "-" for each in values("prompt_tokens")]
    _print_row("prompt tokens", prompts)
    for label, several in mine.items():
        busy = sum(run.get("others_cores", 0.0) >= LIMIT_CORES for run in several)
        if busy:
            print(f"  {label}: the machine was not quiet in {busy} of {len(several)} runs")
        if any(run.get("idle_servers_cores", 0.0) >= LIMIT_CORES for run in several):
            print(f"  {label}: a server that was not measured took CPU time meanwhile")
        short = sum(run.get("short", 0) for run in several)
        if short:
            print(f"  {label}: {short} answers ended early")
        failed = sum(run["failed"] for run in several)
        words = list(dict.fromkeys(word for run in several for word in run.get("failures", ())))
        if failed:
            print(f"  {label}: {failed} requests failed: {'; '.join(map(json.dumps, words[:3]))}")
