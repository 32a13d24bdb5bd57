"""A server of tools for tests, in lines of JSON-RPC over standard input and output. Not a module: run as a program."""

import json
import os
import sys
import time

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [{"name": name, "description": f"To {name}.", "inputSchema": TEXT} for name in ("say", "fail", "end", "wait")]


def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def texts(*parts, **more):
    return {"content": [{"type": "text", "text": part} for part in parts], **more}


print("started, says no message", flush=True)
is_ready = False
for line in sys.stdin:
    message = json.loads(line)
    number, given = message.get("id"), message.get("params", {})
    if message.get("method") == "initialize":
        assert given["protocolVersion"] and given["clientInfo"]["name"] == "dtrain" and given["capabilities"] == {}
        send(id=number, result={"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}})
    elif message.get("method") == "notifications/initialized":
        is_ready = True
        send(id=7000, method="ping")
        send(id="r", method="roots/list")
        send(method="notifications/message", params={"level": "info", "data": "hello"})
    elif message.get("method") == "tools/list":
        assert is_ready
        if "cursor" not in given:
            send(id=number, result={"tools": TOOLS[:2], "nextCursor": "b"})
        else:
            send(id=number, result={"tools": TOOLS[2:]})
    elif message.get("method") == "tools/call":
        name, text = given["name"], given["arguments"].get("text")
        if name == "end":
            os._exit(3)
        if name == "wait":
            time.sleep(60)
        if text is None:
            send(id=number, error={"code": -32602, "message": "no text"})
        elif name == "fail":
            send(id=number, result=texts("it failed", isError=True))
        else:
            send(id=number, result=texts(text, str(os.getpid())))
    elif number == 7000:
        assert message["result"] == {}
    elif number == "r":
        assert message["error"]["code"] == -32601
    else:
        sys.exit(f"what is {line}")
