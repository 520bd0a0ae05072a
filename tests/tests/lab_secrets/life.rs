//! A full life of a daemon with a secret in every place that has one.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use egress_provider_proto::v1::{
    CheckRequest, CloudInit, CreateRequest, DeleteRequest, GetImageRequest, GetProviderInfoRequest, InstanceKey, ListByTagRequest,
    ListImagesRequest, Placement, delete_request,
};
use lab_tests::case::{request, uid_of};
use lab_tests::scratch::ScratchImage;
use lab_tests::{Answer, Case, Clients, EntryFile, ImageServer, ProvidersFile, Sentinels, eventually};
use serde_json::json;
use tonic::metadata::MetadataMap;

pub(crate) const HOST: &str = "hv2";
/// Only ends a test that would hang.
const LIMIT: Duration = Duration::from_secs(60);

/// One word for each place.
pub(crate) const USER_DATA: &str = "kt5ecret-user-data";
const VENDOR_DATA: &str = "kt5ecret-vendor-data";
const QUERY: &str = "kt5ecret-url-query";
const USER_INFO: &str = "kt5ecret-url-user-info";
pub(crate) const BEARER: &str = "kt5ecret-bearer-token";
const KNOWN_HOSTS: &str = "kt5ecret-known-hosts";
const BROKEN_KEY: &str = "kt5ecret-broken-key";
const PASSPHRASE: &str = "kt5ecret-passphrase";
const MISPLACED: &str = "kt5ecret-misplaced";
pub(crate) const PROXY: &str = "kt5ecret-proxy-password";

/// How keys are made that the host does not know: a name, and what `ssh-keygen` is told.
const STRANGE_KEYS: [(&str, &[&str]); 7] = [
    ("ed25519", &["-t", "ed25519"]),
    ("nistp256", &["-t", "ecdsa", "-b", "256"]),
    ("nistp384", &["-t", "ecdsa", "-b", "384"]),
    ("nistp521", &["-t", "ecdsa", "-b", "521"]),
    ("rsa", &["-t", "rsa", "-b", "2048"]),
    ("rsapem", &["-t", "rsa", "-b", "2048", "-m", "PEM"]),
    ("pkcs8", &["-t", "ecdsa", "-b", "256", "-m", "PKCS8"]),
];

/// What the daemon of the test is given, and what of it is secret.
pub(crate) struct Life {
    pub(crate) sentinels: Sentinels,
    pub(crate) file: ProvidersFile,
    entries: Vec<String>,
    server: ImageServer,
    good_key: PathBuf,
}

fn key(dir: &Path, name: &str, options: &[&str], passphrase: &str) -> PathBuf {
    let path = dir.join(format!("key-{name}"));
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-N", passphrase, "-C", "", "-f"]).arg(&path).args(options).stdin(Stdio::null());
    assert!(keygen.status().is_ok_and(|s| s.success()), "{keygen:?}");
    path
}

impl Life {
    pub(crate) async fn prepare(case: &Case) -> Self {
        let dir = case.dir();
        let mut sentinels = Sentinels::default();
        let words = [
            ("user-data", USER_DATA),
            ("vendor data", VENDOR_DATA),
            ("query", QUERY),
            ("user-info", USER_INFO),
            ("bearer token", BEARER),
            ("known_hosts", KNOWN_HOSTS),
            ("broken key", BROKEN_KEY),
            ("passphrase", PASSPHRASE),
            ("misplaced", MISPLACED),
            ("proxy", PROXY),
        ];
        for (of, word) in words {
            sentinels.add_word(of, word);
        }
        sentinels.add_key_file("key of the host, ed25519", &case.lab.id_ed25519);
        sentinels.add_key_file("key of the host, rsa", &case.lab.id_rsa);

        let server = ImageServer::start().await;
        let image = ScratchImage::filled(dir, "i.qcow2", 1, 1);
        for path in ["cold", "byurl"] {
            server.serve(path, image.bytes(), [Answer::Whole]);
        }
        server.serve("gone", Vec::new(), [Answer::Status(404, vec![])]);
        server.serve("cut", image.bytes(), [Answer::ResetAt(1 << 19), Answer::Status(404, vec![])]);
        let away = format!("{}?t={QUERY}", server.url("gone"));
        server.serve("moved", Vec::new(), [Answer::Redirect(302, away)]);
        server.serve("misled", Vec::new(), [Answer::Redirect(302, format!("http://u:{USER_INFO}@127.0.0.1:1/?{QUERY}"))]);

        let mut main = case
            .entry()
            .set("urlPolicy", json!({ "allow": ["127.0.0.1"] }))
            .set("vendorData", format!("#cloud-config\nbootcmd: [\"echo {VENDOR_DATA}\"]\n"))
            .known_hosts(known_hosts(case))
            .image("refused", json!({ "url": format!("http://127.0.0.1:1/x?t={QUERY}"), "firmware": "bios" }));
        for path in ["cold", "gone", "cut", "moved", "misled"] {
            main = main.image(path, json!({ "url": format!("{}?t={QUERY}", server.url(path)), "firmware": "bios" }));
        }
        let mut entries = vec![main];
        let mut with_key = |name: &str, path: &Path| {
            entries.push(case.other_entry(name).set("sshKeyFile", path.to_str()).known_hosts(known_hosts(case)));
        };
        with_key("rsa", &case.lab.id_rsa);
        for (name, options) in STRANGE_KEYS {
            let path = key(dir, name, options, "");
            sentinels.add_key_file(&format!("strange key, {name}"), &path);
            with_key(&format!("strange{name}"), &path);
        }
        let locked = key(dir, "locked", &["-t", "ed25519"], PASSPHRASE);
        sentinels.add_pem("key with a passphrase", &std::fs::read_to_string(&locked).expect("a key"), &public_blob(&locked));
        with_key("locked", &locked);
        let broken = dir.join("key-broken");
        std::fs::write(&broken, format!("-----BEGIN OPENSSH PRIVATE KEY-----\n{BROKEN_KEY}\n-----END OPENSSH PRIVATE KEY-----\n"))
            .expect("a key");
        with_key("broken", &broken);
        let names = entries.iter().map(|e| e.name().to_owned()).collect();
        Self { sentinels, file: ProvidersFile::new(entries), entries: names, server, good_key: case.lab.id_ed25519.clone() }
    }

    /// Lives it; what the daemon answered. `log` is what it has logged so far.
    pub(crate) async fn live<F: Future<Output = String>>(
        &self,
        case: &Case,
        clients: &Clients,
        config: &Path,
        log: impl Fn() -> F,
    ) -> Vec<String> {
        let mut said = Vec::new();
        let mut provider = clients.provider.clone();
        let mut images = clients.images.clone();
        let entry = &self.entries[0];
        said.push(format!("{:?}", provider.get_provider_info(GetProviderInfoRequest::default()).await));
        for entry in &self.entries {
            said.push(format!("{:?}", provider.check(CheckRequest { entry: entry.clone(), ..Default::default() }).await));
        }

        let wanted = |suffix: &str, entry: &str, image: &str| CreateRequest {
            entry: entry.to_owned(),
            cloud_init: Some(CloudInit { user_data: format!("#cloud-config\n# {USER_DATA}\n").into_bytes() }),
            ..request(&case.vm(suffix), HOST, image)
        };
        let mut create = async |wanted: CreateRequest| {
            let mut call = tonic::Request::new(wanted);
            call.metadata_mut().insert("authorization", format!("Bearer {BEARER}").parse().expect("ascii"));
            provider.create(call).await
        };
        create(wanted("cold", entry, "cold")).await.expect("created, with an image that had to be fetched");
        create(wanted("cold", entry, "cold")).await.expect("still there");
        let by_url = format!("{}?t={QUERY}", self.server.url("byurl"));
        create(wanted("byurl", entry, &by_url)).await.expect("created, with an image of the caller's");
        // it boots by UEFI, which searches on for something to boot, on the test's CPU time
        said.push(remove(case, clients, "byurl", entry).await);
        for image in ["gone", "cut", "moved", "misled", "refused"] {
            said.push(failed(&create(wanted(image, entry, image)).await.expect_err(image)));
        }
        let at = |scheme: &str| format!("{scheme}://u:{USER_INFO}@127.0.0.1:1/x?t={QUERY}#{QUERY}");
        for image in [at("http"), at("ftp"), at(""), format!("127.0.0.1/x?t={QUERY}"), format!("\n{QUERY}")] {
            said.push(failed(&create(wanted("url", entry, &image)).await.expect_err("no image of ours")));
        }
        let mut large = wanted("large", entry, "cold");
        large.cloud_init = Some(CloudInit { user_data: USER_DATA.as_bytes().iter().copied().cycle().take((1 << 20) + 1).collect() });
        said.push(failed(&create(large).await.expect_err("too large")));
        let everywhere = CreateRequest {
            name: MISPLACED.to_uppercase(),
            uid: format!("{MISPLACED} "),
            spec_hash: format!("{MISPLACED} "),
            installation_id: format!("{MISPLACED} "),
            placement: Some(Placement { image: format!("x\0{MISPLACED}"), ..Default::default() }),
            ..wanted("x", entry, "cold")
        };
        said.push(failed(&create(everywhere).await.expect_err("wrong in all fields")));
        for entry in &self.entries[2..] {
            said.push(failed(&create(wanted("strange", entry, "tiny")).await.expect_err("a key that the host does not take")));
        }
        create(wanted("rsa", &self.entries[1], "tiny")).await.expect("created, with the other key");

        for entry in &self.entries[..2] {
            let list = ListByTagRequest { entry: entry.clone(), ..Default::default() };
            said.push(format!("{:?}", clients.provider.clone().list_by_tag(list).await.expect("listed")));
            said.push(format!("{:?}", images.list_images(ListImagesRequest { entry: entry.clone(), ..Default::default() }).await));
        }
        for image in ["cold", "gone", "refused", &by_url] {
            let wanted = GetImageRequest { entry: entry.clone(), zone: HOST.to_owned(), image: image.to_owned() };
            said.push(format!("{:?}", images.get_image(wanted).await));
        }
        self.reload(config, log).await;
        for (suffix, entry) in [("cold", 0), ("rsa", 1)] {
            said.push(remove(case, clients, suffix, &self.entries[entry]).await);
        }
        said
    }

    /// Broken providers files, with secrets where they belong and where they do not.
    async fn reload<F: Future<Output = String>>(&self, config: &Path, log: impl Fn() -> F) {
        let key = std::fs::read_to_string(&self.good_key).expect("a key");
        let entry = |change: fn(EntryFile) -> EntryFile| change(EntryFile::unreachable("reloaded", Path::new("/nowhere")));
        let document = |entry: EntryFile| {
            let dir = tempfile::tempdir().expect("a temporary directory");
            std::fs::read_to_string(ProvidersFile::from(entry).write(dir.path())).expect("written a moment ago")
        };
        let broken = [
            document(entry(|e| {
                e.image_set("tiny", "url", format!("https://u:{USER_INFO}@127.0.0.1/x?t={QUERY}"))
                    .set("vendorData", format!("no header: {VENDOR_DATA}"))
                    .set("cpuMode", format!("https://u:{USER_INFO}@h/?{QUERY}"))
                    .host_set("hv1", "address", format!("u:{USER_INFO}@h"))
            })),
            document(entry(|e| {
                e.set("vendorData", json!({ "password": VENDOR_DATA })).set("hosts", format!("https://u:{USER_INFO}@h/?{QUERY}"))
            })),
            document(entry(|e| e).set("sshKeyFile", key.clone()).set("knownHostsFiles", format!("x\n{KNOWN_HOSTS}"))),
            format!(
                "providers:\n- name: x\n  type: kvm2\n  kvm2:\n    vendorData: \"{VENDOR_DATA}\n    sshKeyFile: |\n{key}\n  {KNOWN_HOSTS}: ["
            ),
            format!("{{\"providers\": [{{\"name\": \"x\", \"kvm2\": {{\"vendorData\": \"{VENDOR_DATA}\", \"vendorData\": 1,,}}"),
        ];
        for text in broken {
            let before = log().await.len();
            let new = config.with_extension("next");
            std::fs::write(&new, text).expect("writing a providers file");
            std::fs::rename(&new, config).expect("moving it into place");
            eventually("the broken file is refused", LIMIT, || async {
                let log = log().await;
                if log[before..].contains("refused") { Ok(()) } else { Err(log[before..].to_owned()) }
            })
            .await;
        }
    }
}

async fn remove(case: &Case, clients: &Clients, suffix: &str, entry: &str) -> String {
    let vm = case.vm(suffix);
    let key = InstanceKey { name: vm.clone(), uid: uid_of(&vm), ..Default::default() };
    let selector = Some(delete_request::Selector::Key(key));
    let wanted = DeleteRequest { entry: entry.to_owned(), selector, ..Default::default() };
    format!("{:?}", clients.provider.clone().delete(wanted).await.expect("deleted"))
}

/// A status with all that it carries.
fn failed(status: &tonic::Status) -> String {
    let headers: MetadataMap = status.metadata().clone();
    format!("{status:?} {headers:?} {}", String::from_utf8_lossy(status.details()))
}

/// The hosts' keys, beside a comment and lines that are none.
fn known_hosts(case: &Case) -> Vec<String> {
    let lines = std::fs::read_to_string(&case.lab.known_hosts).expect("the lab's known_hosts");
    let mut lines: Vec<_> = lines.lines().map(|line| format!("{line} {KNOWN_HOSTS}")).collect();
    lines.extend([format!("# {KNOWN_HOSTS}"), format!("{KNOWN_HOSTS} ssh-ed25519 {KNOWN_HOSTS}"), KNOWN_HOSTS.to_owned()]);
    lines
}

fn public_blob(key: &Path) -> Vec<u8> {
    let line = std::fs::read_to_string(key.with_extension("pub")).expect("a public key");
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.decode(line.split_whitespace().nth(1).expect("a key")).expect("base64")
}
