"""A server of tools that breaks the protocol, for tests. Not a module: run as a program.

Its first argument says what is wrong from the start; else the text that its tool is given does.
"""

import json
import os
import sys
import time

SAY = {"name": "say", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}
RESULTS = {
    "list": [],
    "null": None,
    "content": {"content": "abc"},
    "part": {"content": ["abc"]},
    "strange text": {"content": [{"type": "text", "text": {"a": 1}}]},
    "no content": {},
}
PAGES = {"pages": {"tools": [], "nextCursor": "again"}, "tools": {"tools": [{"name": []}]}, "a list": []}
start = sys.argv[1] if len(sys.argv) > 1 else ""


def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def raw(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def result(text):
    return {"content": [{"type": "text", "text": text}]}


for line in sys.stdin:
    message = json.loads(line)
    number, method = message.get("id"), message.get("method")
    if method == "initialize":
        send(id=number, result={} if start != "null" else None)
    elif method == "tools/list":
        send(id=number, result=PAGES.get(start, {"tools": [SAY]}))
    elif method == "tools/call":
        text = message["params"]["arguments"]["text"]
        if text in RESULTS:
            send(id=number, result=RESULTS[text])
        elif text == "error":
            send(id=number, error="it broke")
        elif text == "neither":
            send(id=number)
        elif text == "twice":
            send(id=number, result=result("first"))
            send(id=number, result=result("second"))
        elif text == "others first":
            for wrong in (number + 100, str(number), True, None, [number], float(number)):
                send(id=wrong, result=result("wrong"))
            send(id="x", method="ping")
            send(id=number, method="sampling/createMessage", params={})
            raw(b"[1, 2]\nnull\n{}\n" + b"[" * 5000 + b'\n{"id": 1' + b"0" * 5000 + b"}\n")
            send(id=number, result=result("right"))
        elif text == "no UTF-8":
            raw(b"\xff\n")
        elif text == "endless":
            while True:
                raw(b"x" * (1 << 20))
        elif text == "silent":
            os.close(1)
            time.sleep(60)
        elif text != "wait":
            send(id=number, result=result(text))
