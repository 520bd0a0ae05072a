//! What is left on the hosts and in the daemons when everything was mended and deleted.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use egress_provider_proto::v1::ListByTagResponse;

use crate::clients::Clients;
use crate::counters::{Usage, libvirt_clients, ssh_sessions};
use crate::lab::Host;
use crate::scratch::sha256_of;

use super::breaker::on_host;
use super::course::{Course, POOL};
use super::plan::HOSTS;

/// Longest that what was begun may take to come to its end.
const SOON: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(500);

/// A figure that must come back to where it was, and what it may be off.
#[derive(Debug, Clone)]
pub struct Figure {
    pub what: String,
    pub value: u64,
    margin: u64,
}

/// Threads, descriptors and memory of the daemon that is never ended; connections of both on each host.
pub async fn figures(course: &Arc<Course>, pid: i32) -> Result<Vec<Figure>, String> {
    // each daemon has its link to each host
    for socket in &course.sockets {
        Clients::on(socket).list_complete().await.map_err(|e| format!("listing for the figures: {}", e.message()))?;
    }
    let usage = Usage::of(pid);
    let figure = |what: &str, value: u64, margin: u64| Figure { what: what.to_owned(), value, margin };
    let mut figures = vec![
        figure("threads", usage.threads, 4),
        figure("descriptors", usage.descriptors as u64, 8),
        figure("resident KiB", usage.resident_kib, 64 * 1024),
    ];
    for (n, name) in HOSTS.iter().enumerate() {
        let (sessions, clients) = on_host(course, n, |host| (ssh_sessions(host).len(), libvirt_clients(host))).await;
        figures.push(figure(&format!("sshd processes {name}"), sessions as u64, 0));
        figures.push(figure(&format!("libvirt clients {name}"), clients? as u64, 0));
    }
    Ok(figures)
}

/// Waits until every figure is back; those that are not, and the last of all.
pub async fn back_to(course: &Arc<Course>, pid: i32, before: &[Figure]) -> (Vec<Figure>, Vec<String>) {
    let start = std::time::Instant::now();
    loop {
        let (now, grown) = match figures(course, pid).await {
            Err(e) => (Vec::new(), vec![e]),
            Ok(now) => {
                let grown = before.iter().zip(&now).filter(|(before, now)| now.value > before.value + before.margin);
                let grown = grown.map(|(before, now)| format!("{}: {} became {}", now.what, before.value, now.value)).collect();
                (now, grown)
            }
        };
        if grown.is_empty() || start.elapsed() > SOON {
            return (now, grown);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// What lies on the hosts though everything was deleted: domains, volumes, and bases that are neither complete nor listed.
pub async fn left(course: &Arc<Course>) -> Vec<String> {
    let start = std::time::Instant::now();
    loop {
        let listed = Clients::on(&course.sockets[0]).list_complete().await;
        let mut left = Vec::new();
        match listed {
            Err(e) => left.push(format!("nothing can be listed: {}", e.message())),
            Ok(list) => {
                for (n, name) in HOSTS.iter().enumerate() {
                    let (list, entry, foreign) = (list.clone(), course.case.entry_name(), course.foreign());
                    let on_it = on_host(course, n, move |host| left_on(host, &list, &entry, &foreign)).await;
                    left.extend(on_it.into_iter().map(|what| format!("{name}: {what}")));
                }
            }
        }
        // a pull goes on by itself, and a base that is being written is not listed
        if left.is_empty() || start.elapsed() > SOON {
            return left;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn left_on(host: &Host, list: &ListByTagResponse, entry: &str, foreign: &str) -> Vec<String> {
    let ours = format!("{entry}-");
    let mut left: Vec<_> = match host.try_virsh(&["list", "--all", "--name"]) {
        Ok(domains) => domains.split_whitespace().map(str::to_owned).collect(),
        Err(e) => vec![format!("{ours}{e}")],
    };
    let volumes: BTreeSet<_> = host.volumes(POOL).into_iter().collect();
    left.extend(volumes.iter().cloned());
    left.retain(|name| name.starts_with(&ours) && !name.starts_with(foreign));
    for volume in volumes.iter().filter(|v| v.starts_with(&format!("base-{entry}-"))) {
        let side = volume.strip_suffix(".sha256").or_else(|| volume.strip_suffix(".origin"));
        let good = side.map_or_else(|| is_complete(host, volume), |base| volumes.contains(base));
        if !good && !list.orphan_volumes.iter().any(|orphan| &orphan.name == volume) {
            left.push(format!("{volume} is not complete and not listed"));
        }
    }
    left
}

/// A base with its origin, and with the digest of its bytes as its marker.
fn is_complete(host: &Host, base: &str) -> bool {
    let read = |name: String| std::fs::read_to_string(host.volume_path(POOL, &name)).unwrap_or_default();
    let marker = read(format!("{base}.sha256"));
    read(format!("{base}.origin")).starts_with('{') && marker.len() == 64 && marker == sha256_of(&host.volume_path(POOL, base))
}

/// Things on each host that are not ours, and that stay as they are.
#[derive(Debug, PartialEq, Eq)]
pub struct Foreign {
    documents: Vec<String>,
    volumes: Vec<String>,
}

/// Makes a domain and a volume of our kinds of names on a host.
pub fn plant_foreign(host: &Host, name: &str) {
    host.define(&format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>16</memory><vcpu>1</vcpu><os><type machine='q35'>hvm</type></os>\
         <devices><controller type='usb' model='none'/></devices></domain>"
    ));
    let volume = format!("{name}.qcow2");
    host.virsh(&["vol-create-as", POOL, &volume, "1M", "--format", "raw"]);
    std::fs::write(host.volume_path(POOL, &volume), vec![0x5a; 1 << 20]).expect("writing a volume");
}

pub async fn foreign(course: &Arc<Course>) -> Result<Foreign, String> {
    let mut all = Foreign { documents: Vec::new(), volumes: Vec::new() };
    for n in 0..HOSTS.len() {
        let name = course.foreign();
        let (document, volume) = on_host(course, n, move |host| {
            let document = host.try_virsh(&["dumpxml", "--inactive", &name]);
            (document, sha256_of(&host.volume_path(POOL, &format!("{name}.qcow2"))))
        })
        .await;
        all.documents.push(document?);
        all.volumes.push(volume);
    }
    Ok(all)
}
