"""What the docs promise to list is there: flags, metrics, reasons."""
import re

from against_sources import OPERATOR, SOURCES, operator_flags, registered


def _reasons(ctx):
    """Reasons of conditions that the operator makes up itself, with where they are from."""
    verdicts = ctx.source(f"{OPERATOR}/status.rs")
    found = set(re.findall(r'Verdict::new\([^"\n]*?"(\w+)"', verdicts)) | set(re.findall(r'verdict\([^"\n]*?"(\w+)"', verdicts))
    found |= set(re.findall(r'\("([A-Z]\w+)", "the ', verdicts)) | set(re.findall(r'Phase::\w+, "(\w+)"', verdicts))
    found |= set(re.findall(r'=> "(\w+)"', re.search(r"fn reason.*?\n    \}", ctx.source(f"{OPERATOR}/health/probe.rs"), re.S).group(0)))
    found |= set(re.findall(r'Verdict::new\([^"\n]*?"(\w+)"', ctx.source(f"{OPERATOR}/provider_health/rows.rs")))
    # what no provider answered
    for path in sorted((ctx.root / OPERATOR / "provider_client").glob("*.rs")) + [ctx.root / OPERATOR / "reconcile/act.rs"]:
        text = ctx.source(path.relative_to(ctx.root))
        found |= {_camel(r) for r in re.findall(r'ProviderError::local\([^"\n]*?"([A-Z_]+)"', text)}
    codes = ctx.source("proto/src/code.rs"), ctx.source(f"{OPERATOR}/provider_client/error.rs")
    named, renamed = [dict(re.findall(r'Code::(\w+) => "([A-Z_]+)"', text)) for text in codes]
    found |= {_camel(r) for r in (named | renamed).values()} - {"Ok"}
    # the provider's words for a state, and the rows of a Check
    proto = ctx.read("proto/egressproxies/provider/v1/provider.proto")
    for prefix in ("STATE_REASON_", "CHECK_REASON_"):
        found |= {_camel(r) for r in re.findall(rf"^  {prefix}(\w+) = [1-9]", proto, re.M)}
    return found


def _camel(reason):
    return "".join(word.capitalize() for word in reason.split("_"))


def _events(ctx):
    found = set()
    for file in ("reconcile.rs", "reconcile/act.rs"):
        found |= set(re.findall(r'\.event\(EventType::\w+, "(\w+)"', ctx.source(f"{OPERATOR}/{file}")))
    return found | set(re.findall(r'self\.tell\(name, "(\w+)"', ctx.source(f"{OPERATOR}/gc.rs")))


def all_named(ctx):
    guide, operations = ctx.read("docs/operator.md"), ctx.read("docs/operations.md")
    for flag, default in operator_flags(ctx).items():
        row = re.search(rf"^\| `{flag}` .*$", guide, re.M)
        if not row:
            yield f"docs/operator.md does not list {flag}"
        elif default and f"`{default}`" not in row.group(0):
            yield f"docs/operator.md: {flag}: the default is {default}"
    listed = set(re.findall(r"^\| `(--[\w-]+)`", guide, re.M))
    for flag in sorted(listed - set(operator_flags(ctx))):
        yield f"docs/operator.md lists {flag}, which there is not"
    for variable in re.findall(r'env = "(\w+)"', ctx.read(f"{OPERATOR}/config.rs")):
        if f"`{variable}`" not in guide:
            yield f"docs/operator.md does not name {variable}"
    series = {re.sub("_(bucket|sum|count)$", "", name): labels for name, labels in registered(ctx, SOURCES[0]).items()}
    for name in series:
        if f"`{name}`" not in guide:
            yield f"docs/operator.md does not list {name}"
    reasons = _reasons(ctx)
    if len(reasons) < 80:
        yield f"only {len(reasons)} reasons can be read from the sources"
    for reason in sorted(reasons | _events(ctx)):
        if f"`{reason}`" not in operations:
            yield f"docs/operations.md does not explain {reason}"
    for name in ("operator", "operations"):
        for path, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", ctx.read(f"docs/{name}.md")):
            if "://" in path:
                continue
            at = (ctx.root / "docs" / path) if path else ctx.root / f"docs/{name}.md"
            if not at.exists():
                yield f"docs/{name}.md: there is no {path}"
            elif anchor and anchor not in _anchors(at.read_text()):
                yield f"docs/{name}.md: {at.name} has no #{anchor}"


def _anchors(text):
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
