//! ListByTag over a thousand domains, some of them ours, against one metadata read per domain in sequence.

use std::fmt::Write as _;
use std::path::Path;

use provider_kvm2::config::{self, ConfigHandle};
use provider_kvm2::hypervisor::{Connect as _, HostId, Hypervisor};
use provider_kvm2::image::ImageCache;
use provider_kvm2::link::HostTable;
use provider_kvm2::provider::{Completeness, ListRequest, Operations as _, Provider};
use provider_kvm2::telemetry::metrics::Metrics;

use super::report::{Figure, Limit, Unit};
use super::rig::{HOST, Rig};
use super::rival::local_session;
use super::series::{Series, timed};

const DOMAINS: usize = 1000;
const OURS: usize = 300;
/// The predecessor's mark, as it wrote it.
const NAMESPACE: &str = "https://gitea.home.hrajfrisbee.cz/kacerr/egress-proxies-operator/kvm2";

pub async fn measure(rig: &Rig) -> Figure {
    let names: Vec<String> = (0..DOMAINS).map(|n| rig.case.vm(&format!("d{n:04}"))).collect();
    define_all(rig, &names);
    let daemon = rig.daemon("list", rig.entry()).await;
    let clients = daemon.clients();
    let listed = clients.list_complete().await.expect("a listing");
    assert_eq!(listed.instances.len(), OURS, "the predecessor's marks are read");

    let (listing, sequence) = rounds(rig, daemon.config_path()).await;
    let rival = rig.rival();
    let commands: String = names.iter().map(|name| format!("metadata {name} {NAMESPACE}\n")).collect();
    let (mut call, mut virsh) = (Series::default(), Series::default());
    for _ in 0..rig.rounds {
        let (took, listed) = timed(clients.list_complete()).await;
        assert_eq!(listed.expect("a listing").instances.len(), OURS);
        call.push(took.as_secs_f64() * 1000.0);
        // an absent mark is an error to virsh
        virsh.push(timed(async { rival.lenient_session(&commands) }).await.0.as_secs_f64() * 1000.0);
    }
    local_session(rig.host(), &names.iter().map(|name| format!("undefine {name}\n")).collect::<String>());

    Figure::new(format!("ListByTag over {DOMAINS} domains, {OURS} of them ours"))
        .line("ListByTag over gRPC", Unit::Milliseconds, &call)
        .line("the same within the process of the sequence", Unit::Milliseconds, &listing)
        .line("one metadata read per domain in sequence, same link", Unit::Milliseconds, &sequence)
        .judged("ratio, both in one process", Unit::Plain, &listing.over(&sequence), Limit(0.6))
        .line("one virsh session over SSH, a command per domain", Unit::Milliseconds, &virsh)
}

/// Both over one link and in one process, by turns: that leaves only how the marks are asked for.
async fn rounds(rig: &Rig, file: &Path) -> (Series, Series) {
    let (config, _) = config::load(file, []).unwrap_or_else(|report| panic!("{report}"));
    let (handle, metrics) = (ConfigHandle::fixed(config), Metrics::new());
    let table = HostTable::new(handle.clone(), metrics.clone());
    let images = ImageCache::new(table.clone(), metrics);
    let provider = Provider::new(handle, table.clone(), images, "bench".to_owned());
    let entry = rig.case.entry_name();
    let link = table.control(&HostId { entry: entry.clone(), host: HOST.to_owned() }).await.unwrap_or_else(|e| panic!("{}", e.chain()));
    // the first one also looks up the pool
    list(&provider, &entry).await;

    let (mut sequence, mut listing) = (Series::default(), Series::default());
    for round in 0..2 * rig.rounds {
        let (one, other) = if Rig::ours_first(round) {
            let one = timed(list(&provider, &entry)).await.0;
            (one, timed(in_sequence(&*link)).await.0)
        } else {
            let other = timed(in_sequence(&*link)).await.0;
            (timed(list(&provider, &entry)).await.0, other)
        };
        listing.push(one.as_secs_f64() * 1000.0);
        sequence.push(other.as_secs_f64() * 1000.0);
    }
    provider.shutdown().await;
    drop(link);
    table.shutdown().await;
    (listing, sequence)
}

/// What a simple client does: lists the domains, then asks for the mark of each.
async fn in_sequence(link: &dyn Hypervisor) {
    let domains = link.list_domains().await.expect("a listing of domains");
    let mut marked = 0;
    for domain in &domains {
        marked += usize::from(link.domain_metadata(domain, NAMESPACE).await.expect("a metadata read").is_some());
    }
    assert_eq!((domains.len(), marked), (DOMAINS, OURS));
}

async fn list(provider: &Provider, entry: &str) {
    let request = ListRequest {
        entry: entry.to_owned(),
        installation_id: String::new(),
        page_size: 0,
        page_token: String::new(),
        completeness: Completeness::Required,
    };
    let page = provider.list(request).await.unwrap_or_else(|e| panic!("{}", e.chain()));
    assert_eq!(page.instances.len(), OURS);
}

fn define_all(rig: &Rig, names: &[String]) {
    let dir = rig.dir("domains");
    let mut commands = String::new();
    for (n, name) in names.iter().enumerate() {
        // spread over the listing, as they come in life
        let mark = if n * OURS % DOMAINS < OURS {
            format!(
                "<metadata><kvm2:instance xmlns:kvm2='{NAMESPACE}'><kvm2:managed>true</kvm2:managed><kvm2:uid>uid-{n}</kvm2:uid>\
                 <kvm2:createdAt>2026-01-01T00:00:00Z</kvm2:createdAt></kvm2:instance></metadata>"
            )
        } else {
            String::new()
        };
        let xml = format!(
            "<domain type='qemu'><name>{name}</name>{mark}<memory unit='MiB'>64</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"
        );
        let file = dir.join(format!("{n}.xml"));
        std::fs::write(&file, xml).expect("writing a document");
        let _ = writeln!(commands, "define {}", file.display());
    }
    local_session(rig.host(), &commands);
}
