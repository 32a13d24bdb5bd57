"""Addresses and interfaces of this machine: which one leads to another, and where a socket may listen."""

import fcntl
import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

ALL_INTERFACES = ""


def local_address_towards(host: str, port: int) -> str | None:
    """Return this machine's address on the route to `host`; None where no route leads there. No packet is sent."""
    with suppress(OSError):
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    return None


def choose_listen_address(host: str, port: int) -> str:
    """Return the address of this machine that other processes reach when they look up `host`.

    EVERYWHERE where that is not known: Debian gives a host's own name a loopback address, and other hosts know it by
    another one.
    """
    own = local_address_towards(host, port)
    is_meant = "localhost" in host or _is_address(host)
    return own if own is not None and (is_meant or not is_loopback(own)) else ALL_INTERFACES


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at `address` of this machine, or EVERYWHERE. port: 0 takes a free one."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be built in and switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(normalize_address(address)).is_loopback


def normalize_address(address: str) -> str:
    """Return `address` in plain form: an IPv4 address from an IPv6 socket as IPv4, an IPv6 one without its zone."""
    return address.removeprefix("::ffff:").split("%")[0]


def find_interface(address: str) -> str | None:
    """Return the network interface of this machine that has `address`; None where none has it, or off Linux."""
    if not sys.platform.startswith("linux"):
        return None
    wanted = ipaddress.ip_address(normalize_address(address))
    if wanted.version == 6:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        having = {line.split()[-1] for line in lines if bytes.fromhex(line.split()[0]) == wanted.packed}
        return min(having, default=None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an IPv4 address
                get_address = 0x8915
                answer = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == wanted.packed:
                    return name
    return None


def find_loopback_interface() -> str | None:
    """Return the loopback interface where it is known and up, else None."""
    if sys.platform == "darwin":
        return "lo0"
    return find_interface("127.0.0.1")


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
