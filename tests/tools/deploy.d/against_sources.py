"""deploy/ against the sources: rights and calls, arguments and flags, files and their keys, dashboards and metrics."""
import json
import re

from context import camel, containers, fields, name_of
from files import load_all

OPERATOR = "operator/src"

# Every use of the API server in the operator's sources, by file: resource and what is called of it. A use that is not
# here is a fault, so that nobody adds a call without a look at the rights.
CALLS = {
    "run.rs": {"Proxy": {"watcher"}, "Namespace": {"get"}, "Event": {"publish"}},
    "gc.rs": {"Proxy": {"list"}, "Event": {"publish"}},
    "leader.rs": {"Lease": {"get_opt", "create", "replace"}},
    "discovery/leases.rs": {"Lease": {"list", "create", "get_opt", "replace", "delete"}},
    "provider_health.rs": {"ProviderHealth": {"get_opt", "create", "patch", "replace_status"}},
    "user_data.rs": {"Secret": {"get_opt"}, "ConfigMap": {"get_opt"}},
    "reconcile.rs": {"Proxy": {"get_opt", "patch", "replace_status"}, "Event": {"publish"}},
    "reconcile/act.rs": {"Proxy": {"get_opt"}},
}
VERBS = {
    "get": ["get"], "get_opt": ["get"], "list": ["list"], "create": ["create"], "patch": ["patch"], "replace": ["update"],
    "delete": ["delete"], "watcher": ["list", "watch"], "publish": ["create", "patch"], "replace_status": ["update"],
}
# resource -> API group, plural, the role that has it, names if not all
RESOURCES = {
    "Proxy": ("egressproxies.io", "proxies", ("ClusterRole", "egress-operator"), ()),
    "Event": ("events.k8s.io", "events", ("ClusterRole", "egress-operator"), ()),
    "Namespace": ("", "namespaces", ("ClusterRole", "egress-operator"), ("kube-system",)),
    "Secret": ("", "secrets", ("ClusterRole", "egress-operator-user-data"), ()),
    "ConfigMap": ("", "configmaps", ("ClusterRole", "egress-operator-user-data"), ()),
    "Lease": ("coordination.k8s.io", "leases", ("Role", "egress-operator"), ()),
    "ProviderHealth": ("egressproxies.io", "providerhealths", ("Role", "egress-operator"), ()),
}


def _used(text):
    """Resources and methods that a source uses of the API server."""
    resources = set(re.findall(r"\bApi(?:::)?<(\w+)>", text))
    methods = set(re.findall(r"\bapi\s*\.(\w+)\(", text)) | set(re.findall(r"Api::<\w+>::\w+\((?:[^()]|\(\))*\)\s*\.(\w+)\(", text))
    if re.search(r"\bwatcher\(api", text):
        methods.add("watcher")
    if re.search(r"recorder\s*\.publish\(|Recorder::new\(", text):
        resources.add("Event")
        methods.add("publish")
    return resources, methods


def rbac(ctx):
    root = ctx.root / OPERATOR
    for path in sorted(root.rglob("*.rs")):
        file = str(path.relative_to(root))
        if path.name == "tests.rs":
            continue
        resources, methods = _used(ctx.source(f"{OPERATOR}/{file}"))
        table = CALLS.get(file, {})
        # a file may use the Api of another
        if (resources - set(table)) or methods != set().union(*table.values()):
            yield f"{OPERATOR}/{file} uses {sorted(resources)} with {sorted(methods)}; the table here says {table}"
    needed = set()
    for table in CALLS.values():
        for resource, methods in table.items():
            group, plural, role, names = RESOURCES[resource]
            for method in methods:
                part = f"{plural}/status" if method.endswith("_status") else plural
                needed |= {(role, group, part, verb, names) for verb in VERBS[method]}
    given = set()
    for obj in ctx.rendered["base"]:
        role = (obj["kind"], obj["metadata"]["name"])
        if role not in {r for _, _, r, _ in RESOURCES.values()}:
            continue
        for rule in obj["rules"]:
            if not {"apiGroups", "resources", "verbs"} <= set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}:
                yield f"{name_of(obj)}: a rule has {sorted(rule)}"
                continue
            given |= {(role, g, r, v, tuple(rule.get("resourceNames", ()))) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    for right in sorted(needed - given):
        yield f"the operator lacks {right}"
    for right in sorted(given - needed):
        yield f"the operator has {right} and never uses it"
    bound = {(o["roleRef"]["kind"], o["roleRef"]["name"], o["kind"]) for o in ctx.rendered["base"] if o["kind"].endswith("RoleBinding")}
    if bound != {("ClusterRole", "egress-operator", "ClusterRoleBinding"), ("Role", "egress-operator", "RoleBinding")}:
        yield f"base binds {sorted(bound)}"


def _flags(ctx, path, struct):
    """Flags of a clap struct: name -> default."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}}", ctx.read(path), re.S).group(1)
    found = {}
    for attributes, field in re.findall(r"((?:    #\[arg\(.*?\)\]\n)+)    pub (\w+):", body, re.S):
        if "long" in attributes:
            default = re.search(r'default_value(?:_t)? = "?([^",)]+)"?', attributes)
            found["--" + field.replace("_", "-")] = default and default.group(1)
    return found


def operator_flags(ctx):
    return _flags(ctx, f"{OPERATOR}/config.rs", "Args")


def flags(ctx):
    known = {"operator": operator_flags(ctx), "kvm2-providerd": _flags(ctx, "provider-kvm2/src/cli/serve.rs", "ServeArgs")}
    if any(len(of) < 15 for of in known.values()):
        yield f"the flags of the sources cannot be read: {known}"
    unit = re.search(r"^ExecStart=\S+ serve (.*)$", ctx.read("deploy/systemd/kvm2-providerd.service"), re.M).group(1)
    for flag in re.findall(r"--[\w-]+", unit):
        if flag not in known["kvm2-providerd"]:
            yield f"kvm2-providerd.service: there is no {flag}"
    for where, obj, pod in ctx.workloads():
        sockets = set()
        for container in containers(pod):
            at = f"{where}: {name_of(obj)}: {container['name']}"
            mounts = [m["mountPath"] for m in container["volumeMounts"]]
            ports = {p["containerPort"] for p in container["ports"]}
            for arg in container["args"]:
                if not arg.startswith("--"):
                    continue
                flag, _, value = arg.partition("=")
                if flag not in known[container["name"]]:
                    yield f"{at}: there is no {flag}"
                if value.startswith("/") and not any(value.startswith(m + "/") for m in mounts):
                    yield f"{at}: {arg} is below no mount"
                if (flag.endswith("-listen") or flag == "--metrics") and int(value.rpartition(":")[2]) not in ports:
                    yield f"{at}: {arg} is none of its ports"
            said = container["args"] + container.get("startupProbe", {}).get("exec", {}).get("command", [])
            sockets |= {a for a in said if a.startswith("--socket=")}
        if len(sockets) != 1:
            yield f"{where}: {name_of(obj)}: its probe and its daemon name {sorted(sockets)}"


def _config(ctx, where, name):
    for obj in ctx.rendered[where]:
        if obj["kind"] == "ConfigMap" and obj["metadata"]["name"].startswith(name):
            return load_all(obj["data"]["providers.yaml"])[0]
    raise AssertionError(f"{where} has no ConfigMap {name}")


def providers(ctx):
    text = ctx.read(f"{OPERATOR}/config.rs")
    entry, tls = ({camel(f) for f in fields(text, s)} for s in ("ProviderEntry", "TlsFiles"))
    for path in sorted((ctx.root / "deploy").rglob("operator.yaml")):
        about = path.relative_to(ctx.root)
        file = load_all(path.read_text())[0]
        if set(file) != {"providers"}:
            yield f"{about}: has {sorted(file)}"
            continue
        for provider in file["providers"]:
            if set(provider) - entry or set(provider.get("tls", {})) - tls:
                yield f"{about}: the operator knows no {sorted(set(provider) - entry | set(provider.get('tls', {})) - tls)}"
            if not re.match(r"unix:/|https://[^/]+:\d+$|http://(127\.|localhost:|\[::1\]:)", provider["endpoint"]):
                yield f"{about}: endpoint {provider['endpoint']}"
            if not re.fullmatch(r"(?!-)[a-z0-9-]{1,63}(?<!-)", provider["name"]):
                yield f"{about}: name {provider['name']}"
    for where in ("base", "samples/site"):
        pod = next(p for w, _, p in ctx.workloads() if w == where)
        socket = next(a.partition("=")[2] for c in containers(pod) for a in c["args"] if a.startswith("--socket="))
        of_daemon = {p["name"]: p["kvm2"] for p in _config(ctx, where, "kvm2-providers")["providers"]}
        for provider in _config(ctx, where, "egress-operator-providers")["providers"]:
            if provider["endpoint"] == f"unix:{socket}":
                if provider.get("entry", next(iter(of_daemon))) not in of_daemon:
                    yield f"{where}: the daemon has no entry {provider['entry']}"
            elif provider["endpoint"].startswith("unix:"):
                yield f"{where}: {provider['endpoint']} is not the daemon's socket {socket}"
        daemon = next(c for c in containers(pod) if c["name"] == "kvm2-providerd")
        folder = next(m["mountPath"] for m in daemon["volumeMounts"] if m["name"] == "kvm2-ssh")
        secret = next(o for o in ctx.rendered["samples/site"] if o["kind"] == "Secret" and o["metadata"]["name"] == "kvm2-ssh")
        for name, block in of_daemon.items():
            for key in ("sshKeyFile", "knownHostsFile"):
                if block[key] not in {f"{folder}/{part}" for part in secret["data"]}:
                    yield f"{where}: {name}.{key} {block[key]} is not in the Secret kvm2-ssh at {folder}"
    by_name = {p["name"]: p["kvm2"] for p in _config(ctx, "base", "kvm2-providers")["providers"]}
    for where, proxy in ctx.objects("Proxy"):
        spec = proxy["spec"]
        if "provider" not in spec:
            continue
        block, placement = by_name.get(spec["provider"]), spec["placement"]
        if not block:
            yield f"{where}: {name_of(proxy)}: base has no provider {spec['provider']}"
        elif (
            placement["machineType"] not in block["machineTypes"]
            or placement["image"] not in block["images"]
            or placement["zone"] not in {h["name"] for h in block["hosts"]}
        ):
            yield f"{where}: {name_of(proxy)}: base's {spec['provider']} offers no {placement}"


def registered(ctx, path):
    """Series of a source of metrics: name -> labels."""
    text = ctx.source(path)
    prefix = re.search(r'with_prefix\("(\w+)"\)', text).group(1)
    types = dict(re.findall(r"^    (\w+): ((?:Family|Histogram|Counter|Gauge)[^\n]*),$", text, re.M))
    found = {}
    for unit, name, field in re.findall(r'registry\.register(_with_unit)?\(\s*"(\w+)",.*?(?:Clone::clone\(&|new\.)(\w+)', text, re.S):
        kind = types[field]
        family = re.match(r"Family<(\w+),", kind)
        labels = set(fields(text, family.group(1))) if family else set()
        name = f"{prefix}_{name}"
        if unit:
            name += {"Seconds": "_seconds", "Bytes": "_bytes"}[re.search(rf'"{name.removeprefix(prefix + "_")}".*?Unit::(\w+)', text).group(1)]
        if "Histogram" in kind:
            found |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            found[name + ("_total" if "Counter" in kind else "")] = labels
    return found


SOURCES = [f"{OPERATOR}/metrics.rs", "provider-kvm2/src/telemetry/metrics.rs"]
GRAFANA_LABELS = {"job", "instance", "pod", "namespace"}


def metrics(ctx):
    known = {}
    for source in SOURCES:
        found = registered(ctx, source)
        if len(found) < 9:
            yield f"{source}: only {sorted(found)} can be read"
        known |= found
    asked, alerts = [], set()
    board = json.loads(ctx.read("deploy/monitoring/dashboard.json"))
    for panel in board["panels"]:
        asked += [(f"panel {panel['title']!r}", t["expr"], t["legendFormat"]) for t in panel.get("targets", [])]
    ids = [p["id"] for p in board["panels"]]
    if len(ids) != len(set(ids)):
        yield "two panels have one id"
    shown = {o["data"]["egress-proxies.json"] for o in ctx.rendered["monitoring"] if o["kind"] == "ConfigMap"}
    if [json.loads(s) for s in shown] != [board]:
        yield "the dashboard is not what the ConfigMap holds"
    for _, rule in ctx.objects("PrometheusRule"):
        for group in rule["spec"]["groups"]:
            for alert in group["rules"]:
                if not {"alert", "expr", "labels", "annotations"} <= set(alert) <= {"alert", "expr", "for", "labels", "annotations"}:
                    yield f"alert {alert.get('alert')}: has {sorted(alert)}"
                    continue
                said = " ".join(alert["annotations"].values())
                asked.append((f"alert {alert['alert']}", alert["expr"], re.sub(r"\$labels\.", "", said)))
                alerts.add(alert["alert"])
                if f"| `{alert['alert']}` |" not in ctx.read("docs/operations.md"):
                    yield f"alert {alert['alert']}: docs/operations.md does not say what to do"
    for gone in set(re.findall(r"^\| `((?:Egress|Kvm2)\w+)` \|", ctx.read("docs/operations.md"), re.M)) - alerts:
        yield f"docs/operations.md explains {gone}, which there is not"
    used = set()
    for where, expr, legend in asked:
        if expr.count("(") != expr.count(")") or expr.count("{") != expr.count("}"):
            yield f"{where}: {expr!r} does not close what it opens"
        labels = set()
        for name in re.findall(r"\b(?:egress_operator|kvm2)_\w+", expr):
            if name not in known:
                yield f"{where}: there is no metric {name}"
            labels |= known.get(name, set())
            used.add(name.removesuffix("_bucket"))
        for name, inside in re.findall(r"(\w+)\{([^}]*)\}", expr):
            for label in re.findall(r"(\w+)\s*[=!]", inside):
                if label not in known.get(name, set()):
                    yield f"{where}: {name} has no label {label}"
        kept = {label.strip() for inside in re.findall(r"\bby \(([^)]*)\)", expr) for label in inside.split(",")}
        for label in (kept | set(re.findall(r"\{\{ ?(\w+) ?\}\}", legend))) - labels - GRAFANA_LABELS:
            yield f"{where}: nothing there has a label {label}"
        if re.search(r"\b(sum|max|min|avg|count)\b", expr):
            for label in set(re.findall(r"\{\{ ?(\w+) ?\}\}", legend)) - kept:
                yield f"{where}: {label} is summed away"
    for name in sorted({n.removesuffix("_bucket") for n in known if not n.endswith(("_sum", "_count"))} - used):
        yield f"neither dashboard nor alert shows {name}"


def cloud_init(ctx):
    agent = re.search(r'USER_AGENT: &str = "([^"]+)"', ctx.read(f"{OPERATOR}/health/probe.rs")).group(1)
    found = [(name_of(o), o["spec"]["cloudInit"]["inline"]) for _, o in ctx.objects("Proxy") if "inline" in o["spec"].get("cloudInit", {})]
    found += [(name_of(o), text) for w, o in ctx.objects("Secret") if w == "samples/proxies" for text in o["stringData"].values()]
    if len(found) < 2:
        yield f"only {len(found)} samples of user-data"
    found += [("tests/demo.yaml", doc["spec"]["cloudInit"]["inline"]) for doc in load_all(ctx.read("tests/demo.yaml"))]
    for about, text in found:
        if not text.startswith("#cloud-config\n"):
            yield f"{about}: cloud-init does not know what this is"
            continue
        squid = "\n".join(f["content"] for f in load_all(text)[0]["write_files"])
        acl = re.search(r"^acl (\S+) browser (\S+)$", squid, re.M)
        if not acl or not re.search(acl.group(2), agent) or re.search(acl.group(2), agent + "0"):
            yield f"{about}: Squid does not know the probes of {agent}"
        elif not re.search(rf"^access_log \S+ .*!{acl.group(1)}$", squid, re.M):
            yield f"{about}: probes are in the access log"
        if "http_access allow all" in squid:
            yield f"{about}: lets everybody in"
