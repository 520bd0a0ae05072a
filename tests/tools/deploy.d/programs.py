"""What programs say: hadolint, systemd-analyze, and the ones that were built here."""
import os
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from context import Skip
from files import load_all


def _run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def dockerfiles(ctx):
    rust = tomllib.loads(ctx.read("Cargo.toml"))["workspace"]["package"]["rust-version"]
    uid = next(pod["securityContext"]["runAsUser"] for _, _, pod in ctx.workloads())
    found = sorted((ctx.root / "deploy/docker").glob("*.Dockerfile"))
    if len(found) != 2:
        yield f"{len(found)} Dockerfiles"
    for path in found:
        text = path.read_text()
        ended = _run(ctx.tools / "bin/hadolint", "--no-color", path)
        if ended.returncode != 0:
            yield f"{path.name}: {(ended.stdout + ended.stderr).strip()[:400]}"
        # continued lines are one
        lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line and not line.startswith("#")]
        bases = dict(re.match(r"ARG (\w+)=(\S+)", line).groups() for line in lines if re.match(r"ARG \w+=", line))
        if bases.get("RUST_IMAGE") != f"rust:{rust}-bookworm":
            yield f"{path.name}: builds with {bases.get('RUST_IMAGE')}, the workspace wants {rust}"
        stages = [line.split()[1] for line in lines if line.startswith("FROM ")]
        if stages != ["${RUST_IMAGE}", "${DEBIAN_IMAGE}"] or ":" not in bases.get("DEBIAN_IMAGE", "") or bases["DEBIAN_IMAGE"].endswith(":latest"):
            yield f"{path.name}: its stages are {stages}, of {bases}"
        users = [line.split()[1] for line in lines if line.startswith("USER ")]
        if users != [f"{uid}:{uid}"] or not lines[-2].startswith("USER ") or not lines[-1].startswith("ENTRYPOINT ["):
            yield f"{path.name}: has to end as user {uid}, as in the Deployment, with an ENTRYPOINT"
        package, program = re.search(r"cargo build --locked --release -p (\S+) --bin (\S+)", text).groups()
        manifests = {m["package"]["name"]: m for m in (tomllib.loads(ctx.read(f"{d}/Cargo.toml")) for d in ("operator", "provider-kvm2"))}
        programs = [b["name"] for b in manifests.get(package, {}).get("bin", [])]
        if program not in programs or f'ENTRYPOINT ["/usr/local/bin/{program}"]' not in lines:
            yield f"{path.name}: builds {program} of {package}, which has {programs}, and runs {lines[-1]}"
    ignored = [line.strip("/") for line in ctx.read(".dockerignore").splitlines() if line and not line.startswith("#")]
    members = {m.split("/")[0] for m in tomllib.loads(ctx.read("Cargo.toml"))["workspace"]["members"]}
    for needed in members | {"Cargo.toml", "Cargo.lock"}:
        if any(fnmatch(needed, pattern) for pattern in ignored):
            yield f".dockerignore leaves {needed} out, without which nothing builds"
    for needless in ("target", ".git"):
        if needless not in ignored:
            yield f".dockerignore lets {needless} into the image's context"


def units(ctx):
    if not shutil.which("systemd-analyze"):
        raise Skip("systemd-analyze is not installed")
    copy = ctx.scratch / "units"
    shutil.copytree(ctx.root / "deploy/systemd", copy)
    service = copy / "kvm2-providerd.service"
    # the program need not be installed here
    program = copy / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = service.read_text()
    service.write_text(text.replace("ExecStart=/usr/local/bin/kvm2-providerd", f"ExecStart={program}"))
    ended = _run("systemd-analyze", "verify", "--man=no", service, copy / "kvm2-providerd.socket")
    said = [line for line in ended.stderr.splitlines() if "kvm2-providerd" in line]
    if ended.returncode != 0 or said:
        yield f"systemd-analyze verify: {' '.join(said)[:400] or ended.stderr[:400]}"
    ended = _run("systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", service)
    if ended.returncode != 0:
        yield f"systemd-analyze security: {(ended.stdout.strip().splitlines() or ended.stderr.splitlines() or ['?'])[-1]}"
    user = re.search(r"^User=(\S+)", text, re.M).group(1)
    if not re.search(rf"^u\s+{re.escape(user)}\s", (copy / "kvm2-providerd.sysusers").read_text(), re.M):
        yield f"kvm2-providerd.sysusers makes no user {user}"
    listens = re.search(r"^ListenStream=(\S+)", (copy / "kvm2-providerd.socket").read_text(), re.M).group(1)
    for folder in re.findall(r"^RuntimeDirectory=(\S+)", text, re.M):
        if listens.startswith(f"/run/{folder}/"):
            yield f"{listens} goes away with the service's directory /run/{folder}"


def drift(ctx):
    program = os.environ.get("CRDGEN", "")
    if not Path(program).exists():
        raise Skip("crdgen is not built: cargo build -p egress-operator --bin crdgen")
    ended = _run(program)
    if ended.returncode != 0:
        yield f"crdgen: {ended.stderr[:300]}"
    elif load_all(ended.stdout) != load_all(ctx.read("deploy/crd/crds.yaml")):
        yield "deploy/crd/crds.yaml is not what the types say: cargo run -p egress-operator --bin crdgen >deploy/crd/crds.yaml"


def daemon(ctx):
    program = os.environ.get("KVM2_PROVIDERD", "")
    if not Path(program).exists():
        raise Skip("kvm2-providerd is not built: cargo build -p provider-kvm2")
    found = sorted((ctx.root / "deploy").rglob("kvm2.yaml"))
    if len(found) < 3:
        yield f"only {len(found)} files named kvm2.yaml"
    for path in found:
        ended = _run(program, "config", "check", path)
        if ended.returncode != 0:
            yield f"{path.relative_to(ctx.root)}: {ended.stderr.strip()[:400]}"
