"""Every file parses, and every kustomization renders."""
import json
import shutil
import subprocess

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError


def load_all(text):
    return [doc for doc in YAML(typ="safe", pure=True).load_all(text) if doc is not None]


def parse(ctx):
    seen = 0
    for path in sorted((ctx.root / "deploy").rglob("*")):
        short = path.relative_to(ctx.root)
        try:
            if path.suffix in (".yaml", ".yml"):
                load_all(path.read_text())
            elif path.suffix == ".json":
                json.loads(path.read_text())
            else:
                continue
            seen += 1
        except (YAMLError, ValueError) as e:
            yield f"{short}: {' '.join(str(e).split())[:300]}"
    if seen < 20:
        yield f"only {seen} files in deploy/: is this the right folder?"


def render(ctx):
    if not (ctx.root / "deploy/crd/crds.yaml").exists():
        yield "deploy/crd/crds.yaml is not there: cargo run -p egress-operator --bin crdgen >deploy/crd/crds.yaml"
        return
    copy = ctx.scratch / "deploy"
    shutil.copytree(ctx.root / "deploy", copy)
    # what a site has and git has not
    for name in ("id_ed25519", "known_hosts", "token"):
        (copy / "samples/site" / name).write_text("of the check\n")
    for file in sorted(copy.rglob("kustomization.yaml")):
        folder = str(file.parent.relative_to(copy))
        ended = subprocess.run([ctx.tools / "bin/kubectl", "kustomize", file.parent], capture_output=True, text=True, check=False)
        if ended.returncode != 0 or ended.stderr.strip():
            yield f"deploy/{folder}: {ended.stderr.strip()[:500]}"
            continue
        ctx.rendered[folder] = load_all(ended.stdout)
        names = [(o["apiVersion"], o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in ctx.rendered[folder]]
        for name in {n for n in names if names.count(n) > 1}:
            yield f"deploy/{folder}: {name} is there twice"
    for needed in ("base", "monitoring", "samples/site", "samples/proxies", "crd"):
        if needed not in ctx.rendered:
            yield f"deploy/{needed} is not rendered"
