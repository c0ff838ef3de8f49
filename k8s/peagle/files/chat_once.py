"""Ask the server at the URL in argv for one token; the exit code says whether an answer came. Standard library only."""

import json
import os
import sys
import urllib.request

url = sys.argv[1]
key = os.environ.get("PEAGLE_TEST_KEY")


def call(path: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


model = call("/v1/models")["data"][0]["id"]
messages = [{"role": "user", "content": "Say hello."}]
answer = call("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1})
if answer["usage"]["completion_tokens"] != 1:
    sys.exit(f"wanted one token, got {answer}")
sys.stdout.write(f"{model} answers\n")
