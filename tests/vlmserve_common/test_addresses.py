"""Addresses of links between servers."""

from __future__ import annotations

import pytest

from vlmserve_common.transport.addresses import is_loopback, split_tcp_url, tcp_url


@pytest.mark.parametrize(
    ("host", "url", "alone"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:80", True),
        ("::1", "tcp://[::1]:80", True),
        ("localhost", "tcp://localhost:80", True),
        ("192.0.2.1", "tcp://192.0.2.1:80", False),
        ("2001:db8::1", "tcp://[2001:db8::1]:80", False),
        ("0.0.0.0", "tcp://0.0.0.0:80", False),
    ],
)
def test_hosts_with_and_without_brackets(host: str, url: str, alone: bool):
    assert tcp_url(host, 80) == url
    assert split_tcp_url(url) == (host, 80)
    assert is_loopback(host) is alone
