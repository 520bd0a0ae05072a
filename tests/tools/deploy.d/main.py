"""Runs the checks of deploy/ over a tree, and breaks the tree on purpose to see that they notice."""
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import context
import breaks
import against_docs
import against_sources
import files
import objects
import programs

CHECKS = [
    ("files", files.parse),
    ("render", files.render),
    ("schemas", objects.schemas),
    ("resource definitions", objects.definitions),
    ("samples fit the definitions", objects.samples),
    ("references", objects.references),
    ("restricted pods", objects.restricted),
    ("RBAC is what the operator calls", against_sources.rbac),
    ("flags", against_sources.flags),
    ("providers files", against_sources.providers),
    ("dashboards and alerts", against_sources.metrics),
    ("cloud-init", against_sources.cloud_init),
    ("docs", against_docs.all_named),
    ("Dockerfiles", programs.dockerfiles),
    ("units", programs.units),
    ("generated definitions are up to date", programs.drift),
    ("the daemon takes its providers files", programs.daemon),
]


def run(root, only=None, say=lambda line: None):
    """Faults and skips by check."""
    ctx = context.Context(root)
    faults, skips = {}, {}
    for name, check in CHECKS:
        if only and name != only and name not in ("files", "render"):
            continue
        try:
            found = list(check(ctx))
        except context.Skip as skip:
            skips[name] = str(skip)
            say(f"skip  {name}: {skip}")
            continue
        except Exception as e:  # noqa: BLE001: what a check does not expect is a fault as well
            at = traceback.extract_tb(e.__traceback__)[-1]
            found = [f"{type(e).__name__}: {e} ({Path(at.filename).name}:{at.lineno})"]
        if found:
            faults[name] = found
            say(f"FAIL  {name}")
            for fault in found[:20]:
                say(f"      {fault}")
            if name in ("files", "render"):
                break
        else:
            say(f"ok    {name}")
    ctx.close()
    return faults, skips


def selftest(root):
    """Each break has to be noticed by the check that it is for."""
    wrong = 0
    for number, (name, path, old, new) in enumerate(breaks.BREAKS):
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "tree"
            copy.mkdir()
            for part in context.PARTS:
                source = root / part
                if source.is_dir():
                    shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("target"))
                elif source.exists():
                    (copy / part).parent.mkdir(exist_ok=True)
                    shutil.copy(source, copy / part)
            text = (copy / path).read_text()
            if old not in text:
                print(f"FAIL  break {number} ({name}): {path} has no {old!r} to break")
                wrong += 1
                continue
            (copy / path).write_text(text.replace(old, new, 1))
            faults, skips = run(copy, only=name)
        if name in skips:
            print(f"skip  {name}: {skips[name]}")
        elif name not in faults:
            print(f"FAIL  {name} does not notice {old!r} -> {new!r} in {path}; it says {faults or 'nothing'}")
            wrong += 1
        else:
            print(f"red   {name}: {old.strip()[:50]!r} -> {new.strip()[:50]!r}: {faults[name][0][:140]}")
    unbroken = [name for name, _ in CHECKS if name not in {b[0] for b in breaks.BREAKS}]
    for name in unbroken:
        print(f"FAIL  nothing breaks {name}")
    print(f"{len(breaks.BREAKS)} breaks, {wrong + len(unbroken)} not noticed")
    return 1 if wrong or unbroken else 0


def main():
    root = Path(sys.argv[1])
    if sys.argv[2:] == ["--selftest"]:
        return selftest(root)
    if sys.argv[2:]:
        print(f"unknown option {sys.argv[2]}; see the head of tests/tools/deploy", file=sys.stderr)
        return 2
    faults, skips = run(root, say=print)
    if faults:
        return 1
    if skips:
        print("SKIP " + "; ".join(skips.values()))
        return 75
    return 0


sys.exit(main())
