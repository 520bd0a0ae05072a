//! One entry's block: every key, its default and its limits.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::reader::{Block, Field};
use super::schema::{BUDGETS, HOST, IMAGE, MACHINE_TYPE, URL_POLICY};
use super::url_policy::{Allowed, PlainHttp};
use super::{
    CatalogueImage, DigestPolicy, Entry, Firmware, GuestAgent, Host, HostKeys, ImageFormat, ImageUrl, MachineType, NetworkConfig,
    PoolReserve, Sha256Hex, UrlPolicy, VirtType, is_identifier, values, vendor_header,
};
use crate::hypervisor::Budgets;

const DEFAULT_DISK_GIB: u64 = 10;
const DEFAULT_MAX_IMAGE_GIB: u64 = 20;
const DEFAULT_SOCKET: &str = "/var/run/libvirt/libvirt-sock";
const DEFAULT_POOL: &str = "default";
const DEFAULT_MACHINE: &str = "q35";

/// Sizes in GiB end here: far above any disk, far below any overflow.
const MAX_GIB: u64 = 65536;

pub(super) const NAME_RULE: &str = "must be at most 64 letters, digits, dots, dashes and underscores, not beginning with a dot or a dash";

/// Names that URL-keyed images take in the cache.
const URL_KEY_PREFIX: &str = "url-";

/// Reads the block of the entry `name`. The value is only good if no fault was collected.
pub(super) fn read(name: &str, block: &Block<'_>) -> Entry {
    let mut warnings = Vec::new();
    let virt_type = block.get("virtType").choice(&[("kvm", VirtType::Kvm), ("qemu", VirtType::Qemu)]).unwrap_or(VirtType::Kvm);
    let guest_agent = flag(block, "installGuestAgent", true, GuestAgent::Install, GuestAgent::Leave);
    let digests = flag(block, "requireDigest", false, DigestPolicy::Required, DigestPolicy::Optional);
    Entry {
        name: name.to_owned(),
        ssh_key_file: file(&block.get("sshKeyFile"), "name the file of the private SSH key").unwrap_or_default(),
        host_keys: host_keys(block, &mut warnings),
        disk_size_gib: disk_size(block),
        vendor_data: vendor_data(&block.get("vendorData"), guest_agent),
        guest_agent,
        network_config: flag(block, "networkConfig", true, NetworkConfig::Written, NetworkConfig::Omitted),
        images: images(&block.get("images"), digests, &mut warnings),
        machine_types: machine_types(&block.get("machineTypes")),
        hosts: hosts(&block.get("hosts"), &mut warnings),
        virt_type,
        cpu_mode: cpu_mode(&block.get("cpuMode"), virt_type),
        machine: identifier(&block.get("machine")).unwrap_or_else(|| DEFAULT_MACHINE.to_owned()),
        pool_reserve: block.get("poolReserveGiB").number(0..=MAX_GIB).map_or(PoolReserve::FivePercent, |n| PoolReserve::Bytes(n << 30)),
        max_image_bytes: block.get("maxImageGiB").number(1..=MAX_GIB).unwrap_or(DEFAULT_MAX_IMAGE_GIB) << 30,
        url_policy: url_policy(block.get("urlPolicy").block(URL_POLICY)),
        digests,
        budgets: budgets(&block.get("budgets").block(BUDGETS)),
        warnings,
    }
}

fn flag<T>(block: &Block<'_>, name: &'static str, default: bool, yes: T, no: T) -> T {
    if block.get(name).flag().unwrap_or(default) { yes } else { no }
}

fn identifier(field: &Field<'_>) -> Option<String> {
    let text = field.text()?;
    field.expect(is_identifier(&text), NAME_RULE);
    Some(text)
}

/// A path; its file is read when it is needed, since a Secret may land later.
fn file(field: &Field<'_>, advice: &str) -> Option<PathBuf> {
    let text = field.required_text(advice)?;
    field.expect(!text.contains('\n') && !text.contains('\0'), "must be the path of a file, not its content");
    Some(text.into())
}

fn host_keys(block: &Block<'_>, warnings: &mut Vec<String>) -> HostKeys {
    if block.get("insecureIgnoreHostKey").flag().unwrap_or(false) {
        warnings.push("insecureIgnoreHostKey is set: whoever answers at a host's address is trusted; set knownHostsFile instead".into());
        return HostKeys::Ignored;
    }
    let advice = "name a known_hosts file, or set insecureIgnoreHostKey: true to trust whoever answers";
    HostKeys::KnownHosts(file(&block.get("knownHostsFile"), advice).unwrap_or_default())
}

fn disk_size(block: &Block<'_>) -> u64 {
    // the predecessor took 0 as "not set"
    match block.get("diskSizeGb").number(0..=MAX_GIB) {
        None | Some(0) => DEFAULT_DISK_GIB,
        Some(n) => n,
    }
}

fn vendor_data(field: &Field<'_>, agent: GuestAgent) -> Option<String> {
    let text = field.text()?;
    if let Err(dropped) = vendor_header::check(&text, agent) {
        field.fault(dropped);
    }
    Some(text)
}

fn cpu_mode(field: &Field<'_>, virt_type: VirtType) -> String {
    let default = match virt_type {
        VirtType::Kvm => "host-passthrough",
        // emulation has no host CPU to pass through
        VirtType::Qemu => "maximum",
    };
    let Some(mode) = identifier(field) else { return default.to_owned() };
    field.expect(
        virt_type == VirtType::Kvm || mode != "host-passthrough",
        "does not work with virtType: qemu; use maximum or the name of a CPU model",
    );
    mode
}

fn images(field: &Field<'_>, digests: DigestPolicy, warnings: &mut Vec<String>) -> BTreeMap<String, CatalogueImage> {
    field.named().into_iter().flatten().filter_map(|(key, field)| Some((key.clone(), image(&key, field, digests, warnings)?))).collect()
}

fn image(key: &str, field: Field<'_>, digests: DigestPolicy, warnings: &mut Vec<String>) -> Option<CatalogueImage> {
    field.expect(is_identifier(key), format_args!("the key of an image {NAME_RULE}"));
    field.expect(!key.starts_with(URL_KEY_PREFIX), "the key of an image must not begin with url-, which is kept for images named by URL");
    let around = field.clone();
    let block = field.block(IMAGE);
    let digest_field = block.get("sha256");
    let digest_text = digest_field.text();
    let sha256 = digest_text.as_deref().and_then(|text| {
        let digest = Sha256Hex::parse(text);
        digest_field.expect(digest.is_some(), "must be 64 hex digits");
        digest
    });
    let format = block.get("format").choice(&[("qcow2", ImageFormat::Qcow2), ("raw", ImageFormat::Raw)]).unwrap_or(ImageFormat::Qcow2);
    let firmware = block.get("firmware").choice(&[("uefi", Firmware::Uefi), ("bios", Firmware::Bios)]).unwrap_or(Firmware::Uefi);
    if digest_text.is_none() && digests == DigestPolicy::Required {
        around.missing_key("sha256", "requireDigest is set: add the digest of the image");
    }
    let url_field = block.get("url");
    let text = url_field.required_text("give the http(s) URL of the image")?;
    let Some(url) = ImageUrl::parse(&text) else {
        url_field.fault("must be an absolute http or https URL");
        return None;
    };
    let user_info = !url.url().username().is_empty() || url.url().password().is_some();
    url_field
        .expect(!user_info, "must not carry a user name or password, which would show in the URL's every use; serve the image without");
    if url.url().scheme() == "http" && digest_text.is_none() && digests == DigestPolicy::Optional {
        warnings.push(format!("image {key} comes over plain http without a sha256: whoever is on the way decides what boots; add sha256"));
    }
    Some(CatalogueImage { url, sha256, format, firmware })
}

fn machine_types(field: &Field<'_>) -> BTreeMap<String, MachineType> {
    let Some(named) = field.named() else { return BTreeMap::new() };
    if named.is_empty() {
        field.missing("give at least one machine type with vcpus and memoryMiB");
    }
    named
        .into_iter()
        .map(|(key, field)| {
            field.expect(values::is_machine_type(&key), "the key of a machine type must be 1 to 128 printable characters");
            let block = field.block(MACHINE_TYPE);
            let vcpus = required_number(&block.get("vcpus"), 1, 512);
            let memory_mib = required_number(&block.get("memoryMiB"), 64, 4_194_304);
            // 512 fits any integer
            (key, MachineType { vcpus: u32::try_from(vcpus).unwrap_or(1), memory_mib })
        })
        .collect()
}

fn required_number(field: &Field<'_>, least: u64, most: u64) -> u64 {
    if !field.is_set() {
        field.missing(&format!("give a number from {least} to {most}"));
    }
    field.number(least..=most).unwrap_or(least)
}

fn hosts(field: &Field<'_>, warnings: &mut Vec<String>) -> Vec<Host> {
    let Some(items) = field.items() else { return Vec::new() };
    if items.is_empty() {
        field.missing("give at least one host");
    }
    let mut names = BTreeSet::new();
    let mut hosts: Vec<Host> = Vec::new();
    for item in items {
        let (host, name_field) = host(item);
        name_field.expect(host.name.is_empty() || names.insert(host.name.clone()), "is the name of another host too; names are unique");
        let twin = hosts.iter().find(|h| (&h.address, h.port, &h.socket) == (&host.address, host.port, &host.socket));
        if let Some(twin) = twin.filter(|t| t.name != host.name && !host.address.is_empty()) {
            warnings.push(format!("hosts {} and {} are the same machine: its instances are listed twice", twin.name, host.name));
        }
        hosts.push(host);
    }
    hosts
}

fn host(field: Field<'_>) -> (Host, Field<'_>) {
    let block = field.block(HOST);
    let text = |name: &'static str, advice: &str, rule: fn(&str) -> bool, problem: &str| {
        let field = block.get(name);
        let text = field.required_text(advice).unwrap_or_default();
        field.expect(text.is_empty() || rule(&text), problem);
        text
    };
    let optional = |name: &'static str, default: &str, rule: fn(&str) -> bool, problem: &str| {
        let field = block.get(name);
        let text = field.text().unwrap_or_else(|| default.to_owned());
        field.expect(rule(&text), problem);
        text
    };
    let address_field = block.get("address");
    let address = address_field.required_text("write host, host:port or [v6]:port").and_then(|text| {
        let parsed = values::address(&text);
        address_field.expect(parsed.is_some(), "must be host, host:port or [v6]:port, with a port from 1 to 65535");
        parsed
    });
    let (address, port) = address.unwrap_or((String::new(), values::SSH_PORT));
    let host = Host {
        name: text("name", "give the host a name", is_identifier, NAME_RULE),
        address,
        port,
        user: text("user", "name the SSH user", values::is_user, "must be at most 64 printable characters without spaces"),
        socket: optional("socket", DEFAULT_SOCKET, values::is_socket_path, "must be an absolute path of at most 100 bytes"),
        pool: optional("pool", DEFAULT_POOL, is_identifier, NAME_RULE),
        bridge: text(
            "bridge",
            "name the bridge that VMs are attached to",
            values::is_bridge,
            "must be the name of a network interface: at most 15 characters without spaces, slashes and colons",
        ),
    };
    (host, block.get("name"))
}

fn url_policy(block: Block<'_>) -> UrlPolicy {
    let http = flag(&block, "allowHttp", false, PlainHttp::Anywhere, PlainHttp::AllowListed);
    let mut allow = Vec::new();
    for (text, field) in block.get("allow").texts() {
        match Allowed::parse(&text) {
            Ok(entry) => allow.push(entry),
            Err(problem) => field.fault(problem),
        }
    }
    UrlPolicy { http, allow }
}

fn budgets(block: &Block<'_>) -> Budgets {
    let default = Budgets::default();
    let read = |name: &'static str, default| {
        let field = block.get(name);
        let Some(text) = field.text() else { return default };
        values::duration(&text).unwrap_or_else(|problem| {
            field.fault(problem);
            default
        })
    };
    Budgets {
        dial: read("dial", default.dial),
        call: read("call", default.call),
        start: read("start", default.start),
        allocate: read("allocate", default.allocate),
        upload_small: read("uploadSmall", default.upload_small),
        upload_image: read("uploadImage", default.upload_image),
        settle: read("settle", default.settle),
    }
}
