"""The rendered objects: against schemas, against each other, and against the restricted pod security standard."""
import json
import re

import jsonschema

from context import containers, name_of
from files import load_all

# the oldest Kubernetes that deploy/ is for (sidecars), and the newest that there are schemas of
VERSIONS = ["1.29.0", "1.37.0"]
# kinds without a schema here, and what of them is looked at instead
OTHERS = {
    ("egressproxies.io/v1alpha1", "Proxy"): None,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {"selector", "endpoints"},
    ("monitoring.coreos.com/v1", "PrometheusRule"): {"groups"},
}
# made by Kubernetes in every namespace
GIVEN = {"kube-root-ca.crt"}
# where the schemas say that they are from
HOME = "https://kubernetes.io/api/"


class Offline(jsonschema.RefResolver):
    def resolve_remote(self, uri):
        raise LookupError(f"{uri} is not here")


def schemas(ctx):
    base = ctx.tools / "kubernetes_validate/kubernetes-json-schema"
    for version in VERSIONS:
        folder = base / f"v{version}-local-strict"
        parts = json.loads((folder / "_definitions.json").read_text())
        resolver = Offline(HOME, {}, store={HOME + "_definitions.json": parts})
        for where, obj in ctx.objects():
            api, kind = obj["apiVersion"], obj["kind"]
            if (api, kind) in OTHERS:
                keys = OTHERS[api, kind]
                if keys and (set(obj["spec"]) != keys or set(obj) != {"apiVersion", "kind", "metadata", "spec"}):
                    yield f"{where}: {name_of(obj)}: spec has {sorted(obj['spec'])}, not {sorted(keys)}"
                continue
            group, _, short = api.rpartition("/")
            name = "-".join([kind.lower()] + ([group.split(".")[0]] if group else []) + [short]) + ".json"
            if not (folder / name).exists():
                yield f"{where}: {name_of(obj)}: Kubernetes {version} has no {api} {kind}"
                continue
            validator = jsonschema.Draft7Validator(json.loads((folder / name).read_text()), resolver=resolver)
            for error in validator.iter_errors(obj):
                at = ".".join(map(str, error.absolute_path))
                yield f"{where}: {name_of(obj)}: {at}: {error.message[:200]} (Kubernetes {version})"


def _definitions(ctx):
    return {d["spec"]["names"]["kind"]: d for d in ctx.rendered["crd"]}


def definitions(ctx):
    found = _definitions(ctx)
    if set(found) != {"Proxy", "ProviderHealth"}:
        yield f"deploy/crd defines {sorted(found)}"
        return
    for kind, definition in found.items():
        spec = definition["spec"]
        served = [v for v in spec["versions"] if v["served"] and v["storage"]]
        if definition["metadata"]["name"] != f"{spec['names']['plural']}.{spec['group']}":
            yield f"{kind}: its name is {definition['metadata']['name']}"
        if spec["group"] != "egressproxies.io" or spec["scope"] != "Namespaced" or len(served) != 1:
            yield f"{kind}: group {spec['group']}, scope {spec['scope']}, {len(served)} served and stored versions"
            continue
        if "status" not in served[0].get("subresources", {}):
            yield f"{kind}: has no status subresource"
        yield from _documented(kind, served[0]["schema"]["openAPIV3Schema"])


def _documented(at, schema):
    for name, part in schema.get("properties", {}).items():
        if name in ("apiVersion", "kind", "metadata") and "." not in at:
            continue
        if not part.get("description") and name not in ("spec", "status"):
            yield f"{at}.{name}: has no description for kubectl explain"
        yield from _documented(f"{at}.{name}", part)
    if isinstance(schema.get("items"), dict):
        yield from _documented(f"{at}[]", schema["items"])


def _strict(schema):
    """An OpenAPI v3 schema as JSON Schema; unknown fields, which an API server drops, are faults."""
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: _strict(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties", "not"):
            out[key] = _strict(value)
        elif key in ("allOf", "anyOf", "oneOf"):
            out[key] = [_strict(part) for part in value]
        elif not key.startswith("x-") and key not in ("description", "format", "nullable", "default"):
            out[key] = value
    if schema.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
        if "enum" in out and None not in out["enum"]:
            out["enum"] = out["enum"] + [None]
    if "properties" in out and "additionalProperties" not in out and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out["additionalProperties"] = False
    return out


def _rules(schema, value, at=""):
    """(place, rule, value) of every CEL rule that concerns the value."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield at, rule, value
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                yield from _rules(part, value[name], f"{at}.{name}")


def _holds(rule, value):
    """The little of CEL that the rules use, as Python."""
    text = re.sub(r"has\((self|oldSelf)\.(\w+)\)", r'("\2" in \1)', rule)
    text = re.sub(r"(self|oldSelf)\.(\w+)", r'\1["\2"]', text)
    text = re.sub(r"\(([^()]*(?:\([^()]*\))?[^()?]*) \? (\w+) : (\w+)\)", r"(\2 if \1 else \3)", text)
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    # == binds tighter than `not` in Python and looser in CEL
    text = re.sub(r"not (\([^()]*\))", r"(not \1)", text)
    return eval(text, {"__builtins__": {}}, {"self": value, "oldSelf": value})  # noqa: S307: rules of our own


def samples(ctx):
    checked = 0
    shown = [doc for block in re.findall(r"^```yaml\n(.*?)^```", ctx.read("docs/operator.md"), re.M | re.S) for doc in load_all(block)]
    in_docs = [("docs/operator.md", doc) for doc in shown if doc.get("kind") == "Proxy"]
    if not in_docs:
        yield "docs/operator.md shows no Proxy"
    in_docs += [("tests/demo.yaml", doc) for doc in load_all(ctx.read("tests/demo.yaml"))]
    for where, obj in in_docs + list(ctx.objects("Proxy")):
        version = next(v for v in _definitions(ctx)["Proxy"]["spec"]["versions"] if v["name"] == obj["apiVersion"].split("/")[1])
        schema = version["schema"]["openAPIV3Schema"]
        spec = {"properties": {"spec": schema["properties"]["spec"]}, "required": ["spec"]}
        for error in jsonschema.Draft7Validator(_strict(spec) | {"additionalProperties": True}).iter_errors(obj):
            yield f"{where}: {name_of(obj)}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for at, rule, value in _rules(schema, obj):
            try:
                if not _holds(rule["rule"], value):
                    yield f"{where}: {name_of(obj)}{at}: {rule.get('message', rule['rule'])}"
            except Exception as e:  # noqa: BLE001: whatever it is, the rule was not checked
                yield f"the rule {rule['rule']!r} cannot be checked here: {e}"
        checked += 1
    kinds = {key for _, o in ctx.objects("Proxy") for key in (set(o["spec"]) & {"external"}) | set(o["spec"].get("cloudInit", {}))}
    for kind in {"external", "inline", "secretKeyRef"} - kinds:
        yield f"none of {checked} Proxies shows {kind}"


def _ports(pod):
    return {p["name"] for c in containers(pod) for p in c.get("ports", [])}


def _selects(selector, labels):
    return selector and all(labels.get(k) == v for k, v in selector.items())


def references(ctx):
    site = ctx.rendered["samples/site"]
    images = {re.search(r"--bin (\S+)", p.read_text()).group(1) for p in (ctx.root / "deploy/docker").glob("*.Dockerfile")}
    pods = [(w, o["spec"]["template"]["metadata"]["labels"], p) for w, o, p in ctx.workloads()]
    for where, obj, pod in ctx.workloads():
        about = f"{where}: {name_of(obj)}"
        # base leaves the secrets to the site
        there = {(o["kind"], o["metadata"]["name"]): o for o in ctx.rendered[where] + [s for s in site if s["kind"] == "Secret"]}
        volumes = {}
        for volume in pod.get("volumes", []):
            volumes[volume["name"]] = volume
            sources = [volume] + volume.get("projected", {}).get("sources", [])
            for source in sources:
                for kind, key, field in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
                    if key not in source:
                        continue
                    name = source[key].get(field, source[key].get("name"))
                    if name in GIVEN:
                        continue
                    if (kind, name) not in there:
                        yield f"{about}: volume {volume['name']}: there is no {kind} {name}"
                    for item in source[key].get("items", []):
                        if item["key"] not in there.get((kind, name), {}).get("data", {}):
                            yield f"{about}: volume {volume['name']}: {kind} {name} has no {item['key']}"
        mounted = set()
        for container in containers(pod):
            named = {p["name"] for p in container.get("ports", [])}
            for mount in container.get("volumeMounts", []):
                mounted.add(mount["name"])
                if mount["name"] not in volumes:
                    yield f"{about}: {container['name']} mounts {mount['name']}, which is no volume"
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                port = container.get(probe, {}).get("httpGet", {}).get("port")
                if port is not None and port not in named:
                    yield f"{about}: {container['name']}: {probe} asks port {port}, which it has not"
            image, _, tag = container["image"].rpartition(":")
            if image.rpartition("/")[2] not in images or not re.fullmatch(r"\d+\.\d+\.\d+", tag):
                yield f"{about}: {container['image']} is no image of deploy/docker with a version"
        for unused in set(volumes) - mounted:
            yield f"{about}: nobody mounts {unused}"
        if not _selects(obj["spec"]["selector"]["matchLabels"], obj["spec"]["template"]["metadata"]["labels"]):
            yield f"{about}: does not select its own pods"
        accounts = {n for k, n in there if k == "ServiceAccount"}
        if pod.get("serviceAccountName") not in accounts:
            yield f"{about}: there is no ServiceAccount {pod.get('serviceAccountName')}"

    for where, obj in ctx.objects():
        about, spec = f"{where}: {name_of(obj)}", obj.get("spec", {})
        selector, ports = None, []
        if obj["kind"] == "Service":
            selector, ports = spec["selector"], [p["targetPort"] for p in spec["ports"]]
        elif obj["kind"] == "NetworkPolicy":
            selector, ports = spec["podSelector"]["matchLabels"], [p["port"] for r in spec.get("ingress", []) for p in r.get("ports", [])]
        elif obj["kind"] == "PodDisruptionBudget":
            selector = spec["selector"]["matchLabels"]
        if selector is not None:
            chosen = [pod for _, labels, pod in pods if _selects(selector, labels)]
            if not chosen:
                yield f"{about}: selects no pod"
            for port in ports:
                if chosen and port not in _ports(chosen[0]):
                    yield f"{about}: there is no port {port}"
        if obj["kind"] == "ServiceMonitor":
            services = [s for _, s in ctx.objects("Service") if _selects(spec["selector"]["matchLabels"], s["metadata"]["labels"])]
            if not services:
                yield f"{about}: selects no Service"
            for endpoint in spec["endpoints"]:
                if services and endpoint["port"] not in {p["name"] for p in services[0]["spec"]["ports"]}:
                    yield f"{about}: the Service has no port {endpoint['port']}"
        if obj["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            base = {(o["kind"], o["metadata"]["name"], o["metadata"].get("namespace")) for o in ctx.rendered[where] + ctx.rendered["base"]}
            role = obj["roleRef"]
            space = None if role["kind"] == "ClusterRole" else obj["metadata"]["namespace"]
            if (role["kind"], role["name"], space) not in base:
                yield f"{about}: there is no {role['kind']} {role['name']}"
            for subject in obj["subjects"]:
                if (subject["kind"], subject["name"], subject["namespace"]) not in base:
                    yield f"{about}: there is no {subject['kind']} {subject['namespace']}/{subject['name']}"
        if obj["kind"] == "Proxy":
            there = {(o["kind"], o["metadata"]["name"]): o for o in ctx.rendered[where]}
            for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                wanted = obj["spec"].get("cloudInit", {}).get(key)
                found = wanted and there.get((kind, wanted["name"]))
                if wanted and (not found or wanted["key"] not in (found.get("stringData", {}) | found.get("data", {}))):
                    yield f"{about}: there is no {kind} {wanted['name']} with {wanted['key']}"


ALLOWED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def restricted(ctx):
    for namespace in (o for w, o in ctx.objects("Namespace") if w == "base"):
        if namespace["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"{name_of(namespace)} does not enforce the restricted standard"
    for where, obj, pod in ctx.workloads():
        of_pod = pod.get("securityContext", {})
        about = f"{where}: {name_of(obj)}"
        for key in ("hostNetwork", "hostPID", "hostIPC", "hostUsers"):
            if pod.get(key):
                yield f"{about}: {key}"
        for volume in pod.get("volumes", []):
            kind = set(volume) - {"name"}
            if not kind <= ALLOWED_VOLUMES:
                yield f"{about}: volume {volume['name']} is {kind}"
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{about}: every container gets a token of the API server"
        users = set()
        for container in containers(pod):
            own = container.get("securityContext", {})
            at = f"{about}: {container['name']}"

            def effective(key):
                return own.get(key, of_pod.get(key))

            if effective("runAsNonRoot") is not True:
                yield f"{at}: runAsNonRoot is not true"
            if not effective("runAsUser"):
                yield f"{at}: runAsUser is root's or left to the image"
            users.add(effective("runAsUser"))
            if (effective("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
                yield f"{at}: has no seccomp profile"
            if own.get("allowPrivilegeEscalation") is not False:
                yield f"{at}: allowPrivilegeEscalation is not false"
            if own.get("capabilities", {}).get("drop") != ["ALL"] or set(own.get("capabilities", {}).get("add", [])) - {"NET_BIND_SERVICE"}:
                yield f"{at}: keeps capabilities"
            if own.get("privileged") or any("hostPort" in p for p in container.get("ports", [])):
                yield f"{at}: is privileged or has a port of the host"
            # beyond the standard
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{at}: can write its root"
            for kind in ("requests", "limits"):
                missing = {"cpu", "memory"} - set(container.get("resources", {}).get(kind, {}))
                if missing:
                    yield f"{at}: {kind} lack {sorted(missing)}"
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe not in container:
                    yield f"{at}: has no {probe}"
        if len(users) != 1:
            yield f"{about}: containers run as {users}; the socket between them has mode 0600"
        tokens = {v["name"] for v in pod["volumes"] if any("serviceAccountToken" in s for s in v.get("projected", {}).get("sources", []))}
        holders = [c["name"] for c in containers(pod) for m in c.get("volumeMounts", []) if m["name"] in tokens]
        if holders != ["operator"]:
            yield f"{about}: the token of the API server is with {holders}"
