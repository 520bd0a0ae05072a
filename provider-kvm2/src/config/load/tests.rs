use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use rstest::rstest;

use super::super::url_policy::PlainHttp;
use super::super::{
    Config, ConfigReport, DigestPolicy, Firmware, GuestAgent, HostKeys, ImageFormat, NetworkConfig, PoolReserve, VirtType, describe,
};
use super::*;

/// The predecessor's sample, with its `kvm` entry and after the change of type.
const SAMPLE: &str = r##"
providers:
  - name: fake
    type: fake
    fake: {}
  - name: kvm-home
    type: kvm
    kvm:
      anything: [goes, here]
  - name: kvm2-home
    type: kvm2
    kvm2:
      sshKeyFile: /etc/proxy-operator/kvm/id_ed25519
      knownHostsFile: /etc/proxy-operator/kvm/known_hosts
      # insecureIgnoreHostKey: true
      vendorData: |
        #cloud-config
        timezone: UTC
      images:
        debian-13:
          url: https://images.example.net/debian-13.qcow2
          sha256: "0123456789ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef"
        ubuntu-24.04:
          url: https://images.example.net/ubuntu.img
          format: raw
          firmware: bios
      machineTypes:
        small: {vcpus: 1, memoryMiB: 1024}
        medium: {vcpus: 2, memoryMiB: 2048}
      hosts:
        - name: hv1
          address: hv1.example.net:2222
          user: virtadmin
          bridge: br0
        - name: hv2
          address: "[2001:db8::7]"
          user: virtadmin
          bridge: br1
          socket: /run/libvirt/other-sock
          pool: images
"##;

/// The least that is accepted; `more` is put into the block.
fn minimal(more: &str) -> String {
    let block = [
        "sshKeyFile: /k",
        "knownHostsFile: /h",
        "machineTypes: {s: {vcpus: 1, memoryMiB: 1024}}",
        "hosts: [{name: hv1, address: hv1, user: u, bridge: br0}]",
    ];
    // a key of `more` takes the place of the default one
    let kept = block.iter().filter(|line| !more.lines().any(|m| m.split(':').next() == line.split(':').next()));
    let lines: Vec<String> = kept.copied().chain(more.lines()).map(|l| format!("    {l}")).collect();
    format!("providers:\n- name: home\n  type: kvm2\n  kvm2:\n{}\n", lines.join("\n"))
}

fn parse_with(text: &str, env: &[(&str, &str)]) -> Result<(Config, Vec<String>), ConfigReport> {
    parse(Path::new("providers.yaml"), text, env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())))
}

fn entry_of(more: &str) -> Entry {
    let (config, _) = parse_with(&minimal(more), &[]).unwrap_or_else(|report| panic!("{report}"));
    (*config.entries[0]).clone()
}

fn report_of(text: &str) -> ConfigReport {
    parse_with(text, &[]).expect_err("the file has a fault")
}

fn only_fault(more: &str) -> String {
    let report = report_of(&minimal(more));
    assert_eq!(report.faults().len(), 1, "{report}");
    report.to_string()
}

#[test]
fn the_predecessors_file_is_taken_as_it_is() {
    let (config, notes) = parse_with(SAMPLE, &[]).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(notes, ["entry fake of type fake is not served here", "entry kvm-home of type kvm is not served here"]);
    let [e] = &config.entries[..] else { panic!("one entry is ours") };
    assert_eq!(e.name, "kvm2-home");
    assert_eq!(e.ssh_key_file, PathBuf::from("/etc/proxy-operator/kvm/id_ed25519"));
    assert_eq!(e.host_keys, HostKeys::KnownHosts("/etc/proxy-operator/kvm/known_hosts".into()));
    assert_eq!(e.vendor_data.as_deref(), Some("#cloud-config\ntimezone: UTC\n"));
    let debian = &e.images["debian-13"];
    assert_eq!((debian.format, debian.firmware), (ImageFormat::Qcow2, Firmware::Uefi));
    assert_eq!(debian.sha256.as_ref().map(|d| d.as_str().len()), Some(64));
    assert_eq!((e.images["ubuntu-24.04"].format, e.images["ubuntu-24.04"].firmware), (ImageFormat::Raw, Firmware::Bios));
    assert_eq!(e.machine_types["medium"].memory_mib, 2048);
    assert_eq!(e.hosts[0].endpoint(), "hv1.example.net:2222");
    assert_eq!((e.hosts[0].socket.as_str(), e.hosts[0].pool.as_str()), ("/var/run/libvirt/libvirt-sock", "default"));
    assert_eq!(e.hosts[1].endpoint(), "[2001:db8::7]:22");
    assert_eq!((e.hosts[1].socket.as_str(), e.hosts[1].pool.as_str()), ("/run/libvirt/other-sock", "images"));
    assert!(e.warnings.is_empty(), "{:?}", e.warnings);
}

#[test]
fn what_is_not_set_has_its_default() {
    let e = entry_of("");
    assert_eq!((e.disk_size_gib, e.max_image_bytes), (10, 20 << 30));
    assert_eq!((e.guest_agent, e.network_config), (GuestAgent::Install, NetworkConfig::Written));
    assert_eq!((e.virt_type, e.cpu_mode.as_str(), e.machine.as_str()), (VirtType::Kvm, "host-passthrough", "q35"));
    assert_eq!((e.pool_reserve, e.digests), (PoolReserve::FivePercent, DigestPolicy::Optional));
    assert_eq!((e.budgets, e.url_policy), (crate::hypervisor::Budgets::default(), crate::config::UrlPolicy::default()));
    assert_eq!((e.vendor_data, e.images.len()), (None, 0));
}

#[test]
fn zero_empty_and_null_are_not_set_as_for_the_predecessor() {
    let e = entry_of("diskSizeGb: 0\nvendorData: ''\ninstallGuestAgent:\nimages: ~\nurlPolicy:\nbudgets:");
    assert_eq!(e, entry_of(""));
}

#[test]
fn every_setting_is_read() {
    let e = entry_of(
        "insecureIgnoreHostKey: yes\ndiskSizeGb: 40\ninstallGuestAgent: false\nvirtType: qemu\ncpuMode: EPYC-Rome-v2\nmachine: pc-q35-8.2\n\
         networkConfig: off\npoolReserveGiB: 0\nmaxImageGiB: 5\nrequireDigest: true\n\
         urlPolicy: {allowHttp: true, allow: [mirror.lan, '*.corp.example', 10.0.0.0/8]}\n\
         budgets: {dial: 5s, call: 40, start: 2m, allocate: 1h, uploadSmall: 30s, uploadImage: 1h30m, settle: 500ms}",
    );
    assert_eq!(e.host_keys, HostKeys::Ignored);
    assert_eq!((e.disk_size_gib, e.guest_agent, e.network_config), (40, GuestAgent::Leave, NetworkConfig::Omitted));
    assert_eq!((e.virt_type, e.cpu_mode.as_str(), e.machine.as_str()), (VirtType::Qemu, "EPYC-Rome-v2", "pc-q35-8.2"));
    assert_eq!((e.pool_reserve, e.max_image_bytes, e.digests), (PoolReserve::Bytes(0), 5 << 30, DigestPolicy::Required));
    assert_eq!(e.url_policy.http, PlainHttp::Anywhere);
    assert_eq!(e.url_policy.allow.iter().map(ToString::to_string).collect::<Vec<_>>(), ["mirror.lan", "*.corp.example", "10.0.0.0/8"]);
    assert_eq!((e.budgets.call, e.budgets.upload_image), (Duration::from_secs(40), Duration::from_secs(5400)));
    assert_eq!((e.budgets.dial, e.budgets.settle), (Duration::from_secs(5), Duration::from_millis(500)));
    assert_eq!(entry_of("virtType: qemu").cpu_mode, "maximum");
}

#[test]
fn numbers_where_text_belongs_are_taken_as_written() {
    let digest = "0".repeat(63) + "1";
    let e = entry_of(&format!(
        "images: {{24.10: {{url: 'https://h/x', sha256: {digest}}}}}\nhosts: [{{name: 01, address: 10.0.0.1, user: 007, bridge: br0}}]"
    ));
    assert_eq!(e.images["24.10"].sha256.as_ref().map(|d| d.as_str()), Some(digest.as_str()));
    assert_eq!((e.hosts[0].name.as_str(), e.hosts[0].user.as_str()), ("01", "007"));
}

#[test]
fn all_faults_are_in_one_report_with_file_line_path_and_value() {
    let text = "\
providers:
- name: home
  type: kvm2
  kvm2:
    sshKeyFle: /k
    insecureIgnoreHostKey: maybe
    diskSizeGb: 70000
    vendorData: |
      packages: [x]
    images:
      url-x: {url: ftp://h/x, sha256: abc, format: vmdk, firmware: coreboot, size: 3}
    machineTypes:
      small: {vcpus: 0, memoryMiB: lots}
    hosts:
    - name: hv1
      address: hv1:99999
      user: a b
      socket: run/x
      pool: a/b
      bridge: much-too-long-bridge
    - name: hv1
      address: hv2
      user: root
      bridge: [br0]
    urlPolicy: {allow: [169.254.0.0/16]}
    budgets: {dial: 0s, start: soon}
- name: home
  type: kvm2
  kvm2: []
extra: 1
";
    let report = report_of(text).to_string();
    for expected in [
        "providers.yaml is refused: 27 faults",
        "providers.yaml:4: providers[0].kvm2.sshKeyFile: is required",
        "providers.yaml:4: providers[0].kvm2.knownHostsFile: is required",
        "providers.yaml:5: providers[0].kvm2.sshKeyFle: unknown key; did you mean sshKeyFile?",
        "providers.yaml:6: providers[0].kvm2.insecureIgnoreHostKey: true or false is expected (found the text \"maybe\")",
        "providers.yaml:7: providers[0].kvm2.diskSizeGb: must be 0 to 65536 (found \"70000\")",
        "providers.yaml:8: providers[0].kvm2.vendorData: cloud-init drops",
        "(found 14 bytes of text)",
        "providers.yaml:11: providers[0].kvm2.images.url-x: the key of an image must not begin with url-",
        "images.url-x.url: must be an absolute http or https URL (found \"ftp://h/x\")",
        "images.url-x.sha256: must be 64 hex digits (found \"abc\")",
        "images.url-x.format: must be qcow2 or raw (found \"vmdk\")",
        "images.url-x.firmware: must be uefi or bios (found \"coreboot\")",
        "images.url-x.size: unknown key; known here: url, sha256, format, firmware",
        "providers.yaml:13: providers[0].kvm2.machineTypes.small.vcpus: must be 1 to 512 (found \"0\")",
        "machineTypes.small.memoryMiB: a whole number is expected (found the text \"lots\")",
        "providers.yaml:16: providers[0].kvm2.hosts[0].address: must be host, host:port or [v6]:port",
        "(found \"hv1:99999\")",
        "hosts[0].user: must be",
        "hosts[0].socket: must be an absolute path",
        "hosts[0].pool: must be",
        "hosts[0].bridge: must be the name of a network interface",
        "providers.yaml:21: providers[0].kvm2.hosts[1].name: is the name of another host too",
        "hosts[1].bridge: text is expected (found a list)",
        "urlPolicy.allow[0]: link-local addresses are never fetched from; remove the entry (found \"169.254.0.0/16\")",
        "budgets.dial: must be greater than zero (found \"0s\")",
        "budgets.start: must be a duration",
        "providers.yaml:27: providers[1].name: is the name of another entry too",
        "providers[1].kvm2: a map is expected (found a list)",
        "providers.yaml:30: extra: unknown key",
    ] {
        assert!(report.contains(expected), "{expected:?} is not in\n{report}");
    }
}

#[rstest]
#[case::nothing("", "has no entry of type kvm2")]
#[case::empty_list("providers: []\n", "has no entry of type kvm2")]
#[case::only_others("providers: [{name: a, type: fake}]\n", "has no entry of type kvm2")]
#[case::map("providers: {a: 1}\n", "a list is expected (found a map)")]
#[case::scalar("hello\n", "a map is expected (found 5 bytes of text)")]
#[case::entry_is_text("providers: [x]\n", "a map is expected")]
#[case::no_type("providers: [{name: a}]\n", "providers[0].type: is required")]
#[case::no_block("providers: [{name: a, type: kvm2}]\n", "providers[0].kvm2: is required")]
#[case::bad_name("providers: [{name: a/b, type: kvm2, kvm2: {}}]\n", "(found \"a/b\")")]
#[case::other_block("providers: [{name: a, type: kvm2, kvm: {}}]\n", "providers[0].kvm: unknown key; did you mean kvm2?")]
#[case::syntax("providers: [\n", "not readable as YAML")]
#[case::duplicate_key("providers:\n- name: a\n  name: b\n  type: kvm2\n", "the key is there twice, first in line 2")]
fn a_file_that_cannot_be_served_says_why(#[case] text: &str, #[case] expected: &str) {
    let report = report_of(text).to_string();
    assert!(report.contains(expected), "{report}");
}

#[test]
fn a_name_taken_by_an_entry_of_another_type_is_taken() {
    let text = format!("{}- name: home\n  type: kvm2\n  kvm2: {{}}\n", minimal("").replace("type: kvm2", "type: kvm"));
    assert!(report_of(&text).to_string().contains("is the name of another entry too"));
}

#[rstest]
#[case::user_info("images: {a: {url: 'https://u:SENTINEL@h/x'}}", "must not carry a user name")]
#[case::key_in_place_of_its_file("sshKeyFile: |\n  -----BEGIN OPENSSH PRIVATE KEY-----\n  SENTINEL", "must be the path of a file")]
#[case::unknown_key("password: SENTINEL", "unknown key")]
#[case::quoted_number("diskSizeGb: '10'", "a whole number is expected")]
#[case::fraction("diskSizeGb: 1.5", "a whole number is expected")]
#[case::negative("poolReserveGiB: -1", "must be 0 to 65536")]
#[case::huge("maxImageGiB: 99999999999999999999", "must be 1 to 65536")]
#[case::infinite("maxImageGiB: .inf", "a whole number is expected")]
#[case::no_machine_type("machineTypes: {}", "give at least one machine type")]
#[case::no_host("hosts: []", "give at least one host")]
#[case::passthrough("virtType: qemu\ncpuMode: host-passthrough", "use maximum")]
#[case::digest_required("requireDigest: true\nimages: {a: {url: 'https://h/x'}}", "images.a.sha256: is required; requireDigest is set")]
#[case::memory("machineTypes: {s: {vcpus: 1, memoryMiB: 4194305}}", "must be 64 to 4194304")]
#[case::image_key("images: {a b: {url: 'https://h/x'}}", "the key of an image must be at most 64")]
#[case::key_of_a_url_image("images: {url-a: {url: 'https://h/x'}}", "must not begin with url-")]
#[case::no_cpu("machineTypes: {s: {vcpus: 0, memoryMiB: 1024}}", "must be 1 to 512")]
#[case::cpus("machineTypes: {s: {vcpus: 513, memoryMiB: 1024}}", "must be 1 to 512")]
#[case::no_memory("machineTypes: {s: {vcpus: 1, memoryMiB: 0}}", "must be 64 to 4194304")]
#[case::disk("diskSizeGb: 65537", "must be 0 to 65536")]
#[case::bridge("hosts: [{name: hv1, address: hv1, user: u, bridge: 'br 0'}]", "must be the name of a network interface")]
#[case::pool("hosts: [{name: hv1, address: hv1, user: u, bridge: br0, pool: a/b}]", "hosts[0].pool: must be at most 64")]
#[case::vendor_data("vendorData: 'packages: [x]'", "cloud-init drops a document that")]
#[case::mime_in_mime("vendorData: 'MIME-Version: 1.0'", "cloud-init does not look into nested ones")]
#[case::taken_for_mime(
    "installGuestAgent: false\nvendorData: \"#cloud-config\\n# MIME-Version: 1\"",
    "takes a document with MIME-Version:"
)]
fn one_bad_value_is_one_fault_without_secrets(#[case] more: &str, #[case] expected: &str) {
    let report = only_fault(more);
    assert!(report.contains(expected), "{report}");
    assert!(!report.contains("SENTINEL"), "{report}");
}

#[test]
fn what_works_but_is_unsafe_is_a_warning() {
    let e = entry_of(
        "insecureIgnoreHostKey: true\nimages:\n  a: {url: 'http://h/x'}\n  b: {url: 'https://h/x'}\nhosts:\n\
         - {name: hv1, address: hv1, user: u, bridge: br0}\n- {name: hv2, address: 'hv1:22', user: u, bridge: br0}",
    );
    let all = e.warnings.join("\n");
    assert_eq!(e.warnings.len(), 3, "{all}");
    for expected in ["insecureIgnoreHostKey", "image a comes over plain http", "hosts hv1 and hv2 are the same machine"] {
        assert!(all.contains(expected), "{all}");
    }
}

#[test]
fn variables_override_the_file() {
    let e = [
        ("KVM2_PROVIDERS__HOME__DISK_SIZE_GB", "25"),
        ("KVM2_PROVIDERS__HOME__INSTALL_GUEST_AGENT", "False"),
        ("KVM2_PROVIDERS__HOME__HOSTS__HV1__ADDRESS", "[::1]:2222"),
        ("KVM2_PROVIDERS__HOME__HOSTS__HV1__USER", "007"),
        ("KVM2_PROVIDERS__HOME__MACHINE_TYPES__S__MEMORY_MIB", "2048"),
        ("KVM2_PROVIDERS__HOME__URL_POLICY__ALLOW", "mirror.lan, 10.0.0.0/8"),
        ("KVM2_PROVIDERS__HOME__BUDGETS__DIAL", "3s"),
        ("KVM2_CONFIG", "/not/ours"),
        ("PATH", "/bin"),
    ];
    let (config, _) = parse_with(&minimal("diskSizeGb: 5"), &e).unwrap_or_else(|report| panic!("{report}"));
    let e = &config.entries[0];
    assert_eq!((e.disk_size_gib, e.guest_agent), (25, GuestAgent::Leave));
    assert_eq!((e.hosts[0].endpoint(), e.hosts[0].user.as_str()), ("[::1]:2222".to_owned(), "007"));
    assert_eq!((e.hosts[0].bridge.as_str(), e.machine_types["s"].memory_mib), ("br0", 2048));
    assert_eq!((e.url_policy.allow.len(), e.budgets.dial), (2, Duration::from_secs(3)));
}

#[test]
fn a_bad_variable_is_a_fault_that_names_it_beside_those_of_the_file() {
    let env = [
        ("KVM2_PROVIDERS__HOME__INSTALL_GUEST_AGENT", "perhaps"),
        ("KVM2_PROVIDERS__HOME__DISK_SIZE_GB", "1e99"),
        ("KVM2_PROVIDERS__HOME__DISC_SIZE_GB", "1"),
        ("KVM2_PROVIDERS__OFFICE__MACHINE", "q35"),
    ];
    let report = parse_with(&minimal("virtType: xen"), &env).expect_err("faults").to_string();
    for expected in [
        "is refused: 5 faults",
        "virtType: must be kvm or qemu",
        "environment variable KVM2_PROVIDERS__HOME__INSTALL_GUEST_AGENT: providers[0].kvm2.installGuestAgent: true or false is expected",
        "environment variable KVM2_PROVIDERS__HOME__DISK_SIZE_GB: providers[0].kvm2.diskSizeGb: a whole number is expected",
        "environment variable KVM2_PROVIDERS__HOME__DISC_SIZE_GB: DISC_SIZE_GB is no key here; did you mean diskSizeGb?",
        "environment variable KVM2_PROVIDERS__OFFICE__MACHINE: no entry of type kvm2 has this name",
    ] {
        assert!(report.contains(expected), "{expected:?} is not in\n{report}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_one_fault() {
    let dir = tempfile::tempdir().expect("a directory");
    let missing = load(&dir.path().join("none.yaml"), []).expect_err("missing").to_string();
    assert!(missing.contains("cannot be opened"), "{missing}");
    let binary = dir.path().join("binary.yaml");
    std::fs::write(&binary, [0x70, 0xff, 0xfe]).expect("written");
    assert!(load(&binary, []).expect_err("binary").to_string().contains("is not UTF-8 text (byte 1)"));
    let large = dir.path().join("large.yaml");
    std::fs::write(&large, vec![b'#'; MAX_FILE_BYTES as usize + 1]).expect("written");
    assert!(load(&large, []).expect_err("large").to_string().contains("is larger than"));
    assert!(load(dir.path(), []).is_err(), "a directory is no file");
}

#[test]
fn the_description_shows_what_is_served_and_no_secret() {
    let text = SAMPLE.replace("/ubuntu.img", "/ubuntu.img?token=SENTINEL").replace("timezone: UTC", "password: SENTINEL");
    let (config, _) = parse_with(&text, &[]).unwrap_or_else(|report| panic!("{report}"));
    let shown = describe(&config);
    assert!(!shown.contains("SENTINEL"), "{shown}");
    for expected in [
        "entry kvm2-home\n",
        "host hv2: virtadmin@[2001:db8::7]:22, socket /run/libvirt/other-sock, pool images, bridge br1",
        "image ubuntu-24.04: https://images.example.net/ubuntu.img?redacted (raw, bios, no digest)",
        "machine type small: 1 vCPU, 1024 MiB",
        "https from public addresses; digests optional",
        "vendor data 33 bytes",
    ] {
        assert!(shown.contains(expected), "{expected:?} is not in\n{shown}");
    }
}

#[test]
fn the_documentation_has_a_row_for_every_key() {
    use super::super::schema::{Key, Shape};
    fn paths(prefix: &str, keys: &[Key], out: &mut Vec<String>) {
        for key in keys {
            let path = format!("{prefix}{}", key.name);
            match key.shape {
                Shape::Leaf => out.push(path),
                Shape::Block(inner) => paths(&format!("{path}."), inner, out),
                Shape::Catalogue(inner) => paths(&format!("{path}.<key>."), inner, out),
                Shape::Named(inner) => paths(&format!("{path}[]."), inner, out),
            }
        }
    }
    let mut expected = Vec::new();
    paths("", BLOCK, &mut expected);
    let table = include_str!("../../../../docs/config.md");
    let rows: Vec<&str> = table.lines().filter_map(|l| l.strip_prefix("| `")?.split('`').next()).collect();
    for path in &expected {
        assert!(rows.contains(&path.as_str()), "docs/config.md has no row for {path}");
    }
    for row in rows {
        let known = expected.iter().any(|p| p == row) || ["name", "type", "kvm2"].contains(&row);
        assert!(known, "docs/config.md has a row for {row}, which is no key");
    }
}

#[test]
fn no_damage_to_the_file_brings_a_secret_into_the_report() {
    let text = minimal(
        "images:\n  a: {url: 'https://user:SENTINEL@h/x'}\n  b:\n    url: https://h/x?token=SENTINEL\nvendorData: |\n  #cloud-config\n  password: SENTINEL",
    );
    let start = text.find("images").expect("the part with secrets");
    for at in start..text.len() {
        for damage in ["", "\n", "'", ":"] {
            let damaged = format!("{}{damage}{}", &text[..at], &text[at + 1..]);
            if let Err(report) = parse_with(&damaged, &[]) {
                let report = report.to_string();
                assert!(!report.contains("SENTINEL"), "{damage:?} at {at}: {report}");
            }
        }
    }
}

/// Text made of the file's own words finds more than random bytes do.
fn plausible() -> impl Strategy<Value = String> {
    let words = [
        "providers:",
        "- ",
        "name: ",
        "type: kvm2",
        "kvm2:",
        "hosts:",
        "images: ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "\n",
        "\n  ",
        "\n    ",
        "&a ",
        "*a",
        "<<: ",
        "'",
        "\"",
        "|\n",
        "!!binary ",
        "? ",
        "~",
        "-1",
        "1e400",
        ".nan",
        "0x",
        "é",
        "\u{0}",
        "\t",
        "#",
        "[000001]",
        "budgets: ",
        "url: ",
        "http://",
        "--- ",
        "%YAML 1.1\n",
    ];
    proptest::collection::vec(prop::sample::select(words.to_vec()), 0..60).prop_map(|w| w.concat())
}

proptest! {
    #[test]
    fn any_text_is_loaded_or_reported(text in any::<String>()) {
        if let Err(report) = parse_with(&text, &[("KVM2_PROVIDERS__A__HOSTS__B__USER", "x")]) {
            prop_assert!(!report.faults().is_empty());
            let _ = report.to_string();
        }
    }

    #[test]
    fn plausible_text_is_loaded_or_reported(text in plausible()) {
        if let Err(report) = parse_with(&text, &[]) {
            prop_assert!(!report.faults().is_empty());
        }
    }

    #[test]
    fn a_file_with_one_damaged_place_never_panics(at in 0..SAMPLE.len(), with in any::<char>()) {
        let mut text: Vec<char> = SAMPLE.chars().collect();
        text[at] = with;
        let _ = parse_with(&text.into_iter().collect::<String>(), &[]);
    }

    #[test]
    fn a_file_cut_anywhere_never_panics(at in 0..SAMPLE.len()) {
        let _ = parse_with(&SAMPLE[..at], &[]);
    }
}

#[test]
fn aliases_of_aliases_are_a_fault_before_they_are_work() {
    let mut text = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for n in 1..8 {
        let m = n - 1;
        text += &format!("a{n}: &a{n} [*a{m},*a{m},*a{m},*a{m},*a{m},*a{m},*a{m},*a{m},*a{m}]\n");
    }
    let report = report_of(&text).to_string();
    assert!(report.contains("alias"), "{report}");
}
