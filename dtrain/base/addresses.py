"""Addresses and network interfaces of this machine, and sockets that listen on them."""

import fcntl
import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

ALL_INTERFACES = ""  # the address of a socket that listens on all interfaces


def local_address_towards(host: str, port: int) -> str | None:
    """Return this machine's address on the route to a host. No packet is sent.

    Args:
        host: Name or address of the host.
        port: Any port.

    Returns:
        The address. None if there is no route.
    """
    with suppress(OSError):
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        infos.sort(key=lambda info: info[0] != socket.AF_INET)  # IPv4 first
        family, kind, _, _, address = infos[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: for a datagram socket, it only chooses the route
            return probe.getsockname()[0]
    return None


def choose_listen_address(host: str, port: int) -> str:
    """Return an address to listen at, which other processes can connect to by the name `host`.

    Args:
        host: Name or address of this machine.
        port: Any port.

    Returns:
        The address. ALL_INTERFACES if the address that other hosts use is not known. For example, Debian maps a host's
        own name to a loopback address, while other hosts resolve this name to the address of an interface.
    """
    address = local_address_towards(host, port)
    if address is None:
        return ALL_INTERFACES
    is_loopback_meant = "localhost" in host or _is_address(host)
    if is_loopback(address) and not is_loopback_meant:
        return ALL_INTERFACES
    return address


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine.

    Args:
        address: The address, or ALL_INTERFACES.
        port: The port. 0: a free one.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be supported but disabled
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def is_loopback(address: str) -> bool:
    """Check whether an address is a loopback address."""
    return ipaddress.ip_address(normalize_address(address)).is_loopback


def normalize_address(address: str) -> str:
    """Remove the IPv6 prefix of an IPv4-mapped address, and the zone of an IPv6 address.

    Example:
        >>> normalize_address("::ffff:10.0.0.1"), normalize_address("fe80::1%eth0")
        ('10.0.0.1', 'fe80::1')
    """
    return address.removeprefix("::ffff:").split("%")[0]


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has an address. None if there is none, or not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    target = ipaddress.ip_address(normalize_address(address))
    if target.version == 6:
        names = []
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            fields = line.split()  # address in hex, ..., name of the interface
            if bytes.fromhex(fields[0]) == target.packed:
                names.append(fields[-1])
        return min(names, default=None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                get_address = 0x8915  # SIOCGIFADDR
                reply = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
                if reply[20:24] == target.packed:
                    return name
    return None


def find_loopback_interface() -> str | None:
    """Return the name of the loopback interface. None if it is unknown or down."""
    if sys.platform == "darwin":
        return "lo0"
    return find_interface("127.0.0.1")


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
