"""Which addresses are public, and looking hosts up."""

from __future__ import annotations

import asyncio
import ipaddress
import threading

import pytest

from processors.fetch.addresses import NameLookup, is_public_address, system_resolver

PRIVATE = """
127.0.0.1 127.8.9.10 0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.254 192.168.0.1 169.254.169.254
169.254.0.1 100.64.0.1 100.127.255.254 100.100.100.200 168.63.129.16 192.0.0.192 192.0.2.1 198.18.0.1 198.51.100.7
203.0.113.9 192.88.99.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd00:ec2::254 ff02::1 2001:db8::1 3fff::1 2001:2::1 100::1 4000::1 5f00::1
::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 ::10.0.0.1 ::8.8.8.8
64:ff9b::127.0.0.1 64:ff9b::a00:1 64:ff9b::169.254.169.254 64:ff9b:1::8.8.8.8
2002:7f00:1::1 2002:a00:1::1 2002:a9fe:a9fe::1 2001:0:4136:e378:8000:63bf:3fff:fdd2
2a00:1450:4001:80b:0:5efe:127.0.0.1 2a00:1450:4001:80b:200:5efe:10.0.0.1
"""
PUBLIC = """
8.8.8.8 1.1.1.1 93.184.216.34 172.15.255.255 172.32.0.1 100.63.255.255 100.128.0.1 169.253.1.1 223.255.255.254
2606:4700:4700::1111 2a00:1450:4001:80b::200e ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1
2a00:1450:4001:80b:0:5efe:8.8.8.8
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_not_public(address):
    assert not is_public_address(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC.split())
def test_public(address):
    assert is_public_address(ipaddress.ip_address(address))


def test_resolve_asks_once_and_keeps_the_order():
    calls = []

    def resolver(host, port):
        calls.append((host, port))
        return ["2606:4700:4700::1111", "1.1.1.1"]

    found = asyncio.run(NameLookup(resolver).resolve("media.example", 443))
    assert [str(address) for address in found] == ["2606:4700:4700::1111", "1.1.1.1"]
    assert calls == [("media.example", 443)]


def test_so_many_names_at_a_time_are_looked_up_and_no_more():
    release = threading.Event()

    async def scenario():
        lookup = NameLookup(lambda host, port: release.wait(20) and ["1.1.1.1"], most=2)
        stuck = [asyncio.create_task(lookup.resolve("media.example", 80)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="too many host names"):
            await lookup.resolve("other.example", 80)
        release.set()
        await asyncio.gather(*stuck)
        assert await lookup.resolve("other.example", 80)

    try:
        asyncio.run(scenario())
    finally:
        release.set()


@pytest.mark.parametrize("answer", [[], ["no address"], OSError("no such host"), UnicodeError("label too long")])
def test_resolve_turns_every_failure_into_oserror(answer):
    def resolver(host, port):
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(OSError, match=r"media\.example|no such host"):
        asyncio.run(NameLookup(resolver).resolve("media.example", 80))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "::1"])
def test_the_system_knows_loopback_under_many_spellings(host):
    found = asyncio.run(NameLookup(system_resolver).resolve(host, 80))
    assert found
    assert not any(is_public_address(address) for address in found)
