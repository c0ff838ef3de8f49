"""A Kubernetes API in memory, as much of it as `helm install`, `upgrade`, `rollback` and `uninstall` call.

Owns discovery, storing by name, label selectors and merging. Refuses to know controllers: nothing ever runs, so
`--wait` is of no use with it. Helm writes its releases in protobuf; the few fields that it needs are read.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]

# Group and version, plural, kind. All are namespaced but namespaces themselves.
RESOURCES = (
    ("v1", "namespaces", "Namespace"),
    ("v1", "pods", "Pod"),
    ("v1", "services", "Service"),
    ("v1", "secrets", "Secret"),
    ("v1", "configmaps", "ConfigMap"),
    ("v1", "serviceaccounts", "ServiceAccount"),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    ("apps/v1", "deployments", "Deployment"),
    ("apps/v1", "replicasets", "ReplicaSet"),
    ("autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    ("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    ("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
    ("networking.k8s.io/v1", "ingresses", "Ingress"),
    ("monitoring.coreos.com/v1", "servicemonitors", "ServiceMonitor"),
    ("monitoring.coreos.com/v1", "podmonitors", "PodMonitor"),
    ("monitoring.coreos.com/v1", "prometheusrules", "PrometheusRule"),
    ("keda.sh/v1alpha1", "scaledobjects", "ScaledObject"),
    ("gateway.networking.k8s.io/v1", "httproutes", "HTTPRoute"),
    ("inference.networking.k8s.io/v1", "inferencepools", "InferencePool"),
)
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
PATH = re.compile(r"/apis?/((?:[^/]+/)?v[^/]+)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?")
REQUIREMENT = re.compile(r"([^,=!\s]+)\s*(?:(!=|==?)\s*([^,]*)|\s(in|notin)\s*\(([^)]*)\))?(?:,|$)")
PROTOBUF_MAGIC = b"k8s\0"


@dataclass(slots=True)
class Cluster:
    """What is stored, by group and version, plural, namespace and name."""

    url: str = ""
    objects: dict[tuple[str, str, str, str], Object] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def names(self, plural: str) -> list[str]:
        """Of everything of one kind, in order."""
        return sorted(key[3] for key in self.objects if key[1] == plural)

    def get(self, plural: str, name: str) -> Object:
        """The object; KeyError if there is none."""
        return next(value for key, value in self.objects.items() if (key[1], key[3]) == (plural, name))


@contextmanager
def fake_cluster() -> Iterator[Cluster]:
    """Serve an empty cluster on a free port until the block ends."""
    cluster = Cluster()
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="fake-cluster")
    thread.start()
    try:
        yield cluster
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.rstrip("/")
        if (found := _discovery(path)) is not None:
            self._reply(200, found)
            return
        with self.cluster.lock:
            key = self._key(path)
            if key is None:
                self._fail(404, "NotFound")
            elif key[3]:
                self._reply_object(self.cluster.objects.get(key))
            else:
                self._reply(200, self._list(key))

    def do_POST(self) -> None:
        body = self._body()
        with self.cluster.lock:
            key = self._key(urlsplit(self.path).path, body["metadata"]["name"])
            if key is None:
                self._fail(404, "NotFound")
            elif key in self.cluster.objects:
                self._fail(409, "AlreadyExists")
            else:
                self._store(key, body, status=201)

    def do_PUT(self) -> None:
        body = self._body()
        with self.cluster.lock:
            key = self._key(urlsplit(self.path).path)
            if key is None or key not in self.cluster.objects:
                self._fail(404, "NotFound")
            else:
                self._store(key, body)

    def do_PATCH(self) -> None:
        """A merge; or, from Helm 4, the whole object, which may be new."""
        body = self._body()
        is_apply = "apply-patch" in self.headers.get("Content-Type", "")
        with self.cluster.lock:
            key = self._key(urlsplit(self.path).path)
            if key is None or not (is_apply or key in self.cluster.objects):
                self._fail(404, "NotFound")
            else:
                self._store(key, body if is_apply else _merged(self.cluster.objects[key], body))

    def do_DELETE(self) -> None:
        self._read()  # how to delete, which makes no difference here
        with self.cluster.lock:
            key = self._key(urlsplit(self.path).path)
            if key is None:
                self._fail(404, "NotFound")
            else:
                self._reply_object(self.cluster.objects.pop(key, None))

    def _key(self, path: str, name: str = "") -> tuple[str, str, str, str] | None:
        match = PATH.fullmatch(path.rstrip("/"))
        if match is None or (match[1], match[3]) not in {(version, plural) for version, plural, _ in RESOURCES}:
            return None
        return match[1], match[3], match[2] or "", match[4] or name

    def _list(self, key: tuple[str, str, str, str]) -> Object:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        selector = query.get("labelSelector", "")
        items = [
            value
            for (version, plural, namespace, _), value in self.cluster.objects.items()
            if (version, plural) == key[:2] and key[2] in ("", namespace) and _is_selected(value, selector)
        ]
        kind = next(kind for version, plural, kind in RESOURCES if (version, plural) == key[:2])
        return {"kind": f"{kind}List", "apiVersion": key[0], "metadata": {"resourceVersion": "1"}, "items": items}

    def _store(self, key: tuple[str, str, str, str], body: Object, *, status: int = 200) -> None:
        kind = next(kind for version, plural, kind in RESOURCES if (version, plural) == key[:2])
        body = {"apiVersion": key[0], "kind": kind, **body}
        body["metadata"] |= {"namespace": key[2], "uid": "/".join(key), "resourceVersion": "1", "generation": 1}
        if "dryRun=All" not in self.path:
            self.cluster.objects[key] = body
        self._reply(status, body)

    def _body(self) -> Object:
        raw = self._read()
        if raw.startswith(PROTOBUF_MAGIC):
            return _secret(raw)
        loaded: Object = yaml.safe_load(raw) or {}
        return loaded

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _reply_object(self, found: Object | None) -> None:
        if found is None:
            self._fail(404, "NotFound")
        else:
            self._reply(200, found)

    def _fail(self, code: int, reason: str) -> None:
        message = f"{reason}: {self.path}"
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        self._reply(code, {**status, "message": message})

    def _reply(self, code: int, body: Object) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _discovery(path: str) -> Object | None:
    """What the API says about itself, or None if the path is about something else."""
    versions = list(dict.fromkeys(version for version, _, _ in RESOURCES))
    if path == "/version":
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        entries = [
            {"groupVersion": version, "version": version.split("/")[1]} for version in versions if "/" in version
        ]
        groups = [
            {"name": entry["groupVersion"].split("/")[0], "versions": [entry], "preferredVersion": entry}
            for entry in entries
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in versions:
        return None
    resources = [
        {"name": plural, "singularName": "", "namespaced": plural != "namespaces", "kind": kind, "verbs": VERBS}
        for owner, plural, kind in RESOURCES
        if owner == version
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _is_selected(value: Object, selector: str) -> bool:
    labels = value["metadata"].get("labels", {})
    for name, sign, wanted, word, choices in REQUIREMENT.findall(selector):
        actual = labels.get(name)
        if word:
            hit = (actual in [choice.strip() for choice in choices.split(",")]) == (word == "in")
        elif sign == "!=":
            hit = actual != wanted
        else:
            hit = actual == wanted if sign else name in labels
        if not hit:
            return False
    return True


def _merged(old: Object, patch: Object) -> Object:
    """JSON merge patch: None deletes."""
    merged = dict(old)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged


def _secret(raw: bytes) -> Object:
    """A Secret: an envelope whose field 2 is the message, with metadata, data and type as fields 1 to 3."""
    message = _fields(_fields(raw.removeprefix(PROTOBUF_MAGIC))[2][0])
    metadata = _fields(message[1][0])
    data = {name: base64.b64encode(value).decode() for name, value in _entries(message.get(2, [])).items()}
    labels = {name: value.decode() for name, value in _entries(metadata.get(11, [])).items()}
    named = {"name": metadata[1][0].decode(), "labels": labels}
    return {"metadata": named, "type": message[3][0].decode(), "data": data}


def _entries(messages: list[bytes]) -> dict[str, bytes]:
    entries = [_fields(message) for message in messages]
    return {entry[1][0].decode(): entry.get(2, [b""])[0] for entry in entries}


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """The length-delimited fields of a message by their number; numbers are passed over."""
    fields: dict[int, list[bytes]] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        tag = varint()
        if tag & 7 == 0:
            varint()
            continue
        assert tag & 7 == 2, f"wire type {tag & 7} is not used by a Secret"
        length = varint()
        fields.setdefault(tag >> 3, []).append(message[position : position + length])
        position += length
    return fields
