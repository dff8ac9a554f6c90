"""`vlmserve router`: one OpenAI endpoint in front of many servers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vlmserve.config.flags import GIVEN_AS, CommandParser, above_zero, add_settings, in_the_users_words, positive
from vlmserve.config.settings import ENV_PREFIX, load_settings
from vlmserve.router.settings import ROLES, SHARED, RouterSettings, problems_of
from vlmserve_common.errors import SettingsError

_UPSTREAM_KEY = ENV_PREFIX + "UPSTREAM_API_KEY"
_ABOUT = """\
One OpenAI endpoint in front of many servers, on this machine and others.

A request goes where its prompt's beginning, its pictures or its conversation were before, unless that server has much
more to do than others. A request that failed before its answer began is sent to another server. The router holds no
model. GET, POST and DELETE /workers list, add and drain servers while it runs (docs/router.md). A URL may be
dns+http://NAME:PORT: a server at each address of the name, which is looked up every --health-check-interval-s.
"""
_EPILOG = """\
examples:
  vlmserve router --replica http://10.0.0.1:8000 http://10.0.0.2:8000 --port 9000
  vlmserve router --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 http://10.0.0.3:8000
  vlmserve router --replica dns+http://servers.example.com:8000
"""
_ABOUT_ROLES = {
    "replica": "servers that answer requests on their own",
    "decode": "servers that answer, with prompts that others compute: they know these by --prefill-urls",
    "prefill": "servers that compute prompts for those of --decode: they are only watched",
    "encode": "encoders of others, which know them by --encoder-urls: they are only watched",
}


def main(argv: Sequence[str]) -> int:
    """Route until SIGINT or SIGTERM; returns the exit status. Raises VlmserveError or OSError if that fails."""
    settings = read_settings(argv)
    from vlmserve.router.launch import launch_router

    return launch_router(settings)


def read_settings(argv: Sequence[str]) -> RouterSettings:
    """Return the settings of a command line. Raises SettingsError with a line for each problem."""
    parser = CommandParser(
        prog="vlmserve router", description=_ABOUT, epilog=_EPILOG, usage="%(prog)s --replica URL... [options]"
    )
    servers = parser.add_argument_group("servers")
    for role in ROLES:
        text = _ABOUT_ROLES[role]
        servers.add_argument(f"--{role}", nargs="+", action="extend", default=[], metavar="URL", help=text)
    servers.add_argument(
        "--upstream-api-key",
        metavar="KEY",
        help="key that the servers get in place of the client's; without it, the client's own key is passed on "
        f"[env: {_UPSTREAM_KEY}]",
    )
    for name, kind, default, text in (
        ("--connect-timeout-s", above_zero, 5.0, "seconds for a connection to a server"),
        ("--health-check-interval-s", above_zero, 5.0, "seconds between two looks at a server"),
        ("--health-check-timeout-s", above_zero, 5.0, "seconds that a look may take"),
        ("--health-failure-threshold", positive, 3, "looks in a row without an answer until a server counts as dead"),
        ("--drain-timeout-s", above_zero, 600.0, "seconds that requests have to end at a server that is to go"),
    ):
        metavar = "N" if kind is positive else "X"
        text = f"{text} [default: {default:g}]"
        servers.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
    add_settings(parser, SHARED)
    args = vars(parser.parse_args(argv))
    given_as, config = args.pop(GIVEN_AS, {}), args.pop("config")
    urls = tuple((role, url) for role in ROLES for url in args.pop(role))
    own = {name: args.pop(name) for name in list(args) if name in RouterSettings.__annotations__}
    own["upstream_api_key"] = own["upstream_api_key"] or os.environ.get(_UPSTREAM_KEY) or None
    problems = problems_of(urls)
    if problems:
        raise SettingsError("\n".join(problems))
    try:
        http = load_settings(args, config=config)
    except SettingsError as error:
        words = [in_the_users_words(problem, given_as) for problem in str(error).splitlines()]
        raise SettingsError("\n".join(words)) from None
    return RouterSettings(http=http, servers=urls, **own)
