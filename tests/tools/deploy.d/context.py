"""What the checks share: the tree, the rendered objects, and how sources are read."""
import os
import re
import shutil
import tempfile
from pathlib import Path

# what the checks read; a broken copy has these
PARTS = ["deploy", "docs", "operator", "provider-kvm2", "proto", "Cargo.toml", ".dockerignore", "tests/demo.yaml"]


class Skip(Exception):
    """Something is missing that the check needs."""


class Context:
    def __init__(self, root):
        self.root = Path(root)
        self.tools = Path(os.environ["DEPLOY_TOOLS"])
        # folder below deploy/ -> its rendered objects
        self.rendered = {}
        self.scratch = Path(tempfile.mkdtemp())

    def close(self):
        shutil.rmtree(self.scratch, ignore_errors=True)

    def read(self, path):
        return (self.root / path).read_text()

    def source(self, path):
        """A source without its tests and comments."""
        text = self.read(path).split("\n#[cfg(test)]\nmod tests {")[0]
        return re.sub(r"^\s*//.*$", "", text, flags=re.M)

    def objects(self, kind=None):
        """(folder, object) of all renderings."""
        for folder, objects in self.rendered.items():
            for obj in objects:
                if kind is None or obj["kind"] == kind:
                    yield folder, obj

    def workloads(self):
        """(folder, object, pod spec) of whatever makes pods."""
        for folder, obj in self.objects():
            if obj["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
                yield folder, obj, obj["spec"]["template"]["spec"]


def containers(pod):
    return pod.get("initContainers", []) + pod.get("containers", [])


def name_of(obj):
    return f"{obj['kind']} {obj['metadata'].get('name')}"


def fields(text, struct):
    """Names of the fields of a Rust struct."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}}", text, re.S)
    if not body:
        raise AssertionError(f"no struct {struct} in the source")
    return re.findall(r"^    (?:pub )?(\w+):", body.group(1), re.M)


def camel(name):
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
