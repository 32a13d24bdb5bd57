"""Bytes and seconds of a plan as text."""


def gib(size: float) -> str:
    if size < 2**13:
        return f"{size:,.0f} B"
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"


def seconds(time: float) -> str:
    return f"{time:,.2f} s" if time >= 0.1 or time == 0 else f"{time * 1e3:,.2f} ms"
