//! The steps of a Create that change something on the host, each safe to repeat.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use secrecy::ExposeSecret;
use tokio::time::Instant;

use super::Order;
use super::answers::{busy, changed};
use crate::config::{NetworkConfig, VirtType};
use crate::domain::document::Document;
use crate::domain::mark::{self, Mark, Phase};
use crate::domain::names;
use crate::domain::state::{self, State};
use crate::domain::volume::VolumeSpec;
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::{DomainRef, UploadPart, VolumeRef, code};
use crate::image::Base;
use crate::provider::get::require_mark;
use crate::provider::sites::Site;
use crate::provider::{Provider, preflight};
use crate::seed;

impl Provider {
    pub(super) fn mark(&self, order: &Order, prior: Option<&Mark>) -> Mark {
        let now = jiff::Timestamp::now();
        Mark {
            claim: mark::Claim::Managed,
            uid: order.key.uid.clone(),
            created_at: prior.and_then(|m| m.created_at).or(Some(now)),
            phase: Phase::Creating,
            installation_id: order.key.installation_id.clone(),
            spec_hash: order.spec_hash.clone(),
            entry: order.at.entry.name.clone(),
            image_key: order.at.image.key.clone(),
            // known once the volumes are made
            base: String::new(),
            base_digest: String::new(),
            owner: self.replica.clone(),
            attempt_at: Some(now),
        }
    }

    pub(super) async fn define(&self, order: &Order, site: &Site, mark: &Mark, uuid: Option<uuid::Uuid>) -> Result<DomainRef> {
        let Order { at, name, key, .. } = order;
        let document = Document {
            name: name.clone(),
            uuid: uuid.unwrap_or_else(|| names::domain_uuid(&at.entry.name, &at.host.name, &key.installation_id, name, &key.uid)),
            vcpus: at.machine.vcpus.try_into().unwrap_or(NonZeroU32::MIN),
            memory_mib: at.machine.memory_mib.try_into().unwrap_or(NonZeroU64::MIN),
            virt_type: at.entry.virt_type,
            cpu_mode: at.entry.cpu_mode.clone(),
            machine: at.entry.machine.clone(),
            firmware: at.image.firmware,
            overlay_path: site.path_of(&name.overlay_volume()),
            seed_path: site.path_of(&name.seed_volume()),
            bridge: at.host.bridge.clone(),
            mac: names::mac_for(&key.installation_id, name, &key.uid),
            mark: mark.clone(),
        };
        let xml = document.to_xml();
        site.hv.define_domain(&xml).await.map_err(|e| {
            // the name was free a moment ago
            if e.is(code::OPERATION_FAILED) { changed(&order.id()).with_source(e) } else { e.into() }
        })
    }

    /// Refreshes the mark's attempt, unless another daemon has taken the name.
    pub(super) async fn claim(&self, order: &Order, site: &Site, domain: &DomainRef, mark: &Mark) -> Result<()> {
        let id = order.id();
        let element = site
            .hv
            .domain_metadata(domain, mark::NAMESPACE)
            .await
            .map_err(|e| if e.is(code::NO_DOMAIN) { changed(&id) } else { e.into() })?;
        let current = require_mark(element.as_deref(), &id)?;
        if current.owner != mark.owner || current.phase != Phase::Creating {
            return Err(busy(&id));
        }
        self.write_mark(site, domain, &Mark { attempt_at: Some(jiff::Timestamp::now()), ..mark.clone() }).await
    }

    pub(in crate::provider) async fn write_mark(&self, site: &Site, domain: &DomainRef, mark: &Mark) -> Result<()> {
        Ok(site.hv.set_domain_metadata(domain, mark::NAMESPACE, mark::PREFIX, &mark.to_metadata()).await?)
    }

    pub(super) async fn make_overlay(&self, order: &Order, site: &Site, base: &Base, volumes: &[VolumeRef]) -> Result<()> {
        let name = order.name.overlay_volume();
        if let Some(old) = volumes.iter().find(|v| v.name == name) {
            // from an attempt that never got to start the domain: nothing of the guest's is in it
            ignore_missing(site.hv.delete_volume(old).await)?;
        }
        let spec = VolumeSpec::Overlay {
            name: &name,
            capacity: order.at.entry.disk_bytes(),
            backing_path: &base.path,
            backing_format: base.format,
        };
        match site.hv.create_volume(&site.pool, &spec.to_xml()).await {
            Ok(_) => Ok(()),
            Err(e) if e.is(code::STORAGE_VOL_EXIST) => Err(busy(&order.id()).with_source(e)),
            Err(e) => Err(vanished_base(e.into())),
        }
    }

    pub(super) async fn make_seed(&self, order: &Order, site: &Site, volumes: &[VolumeRef]) -> Result<()> {
        let name = order.name.seed_volume();
        let entry = &order.at.entry;
        let mac = names::mac_for(&order.key.installation_id, &order.name, &order.key.uid);
        let meta_data = seed::network::meta_data(&order.name);
        let vendor_data = seed::vendor::vendor_data(entry.vendor_data.as_deref(), entry.guest_agent);
        let network_config = (entry.network_config == NetworkConfig::Written).then(|| seed::network::config(&mac));
        let files = seed::iso::SeedFiles {
            user_data: order.user_data.expose_secret(),
            meta_data: meta_data.as_bytes(),
            vendor_data: &vendor_data,
            network_config: network_config.as_deref().map(str::as_bytes),
        };
        let image = seed::iso::build(&files)
            .map_err(|fault| ProviderError::new(Reason::Internal, "the seed image cannot be built").with_source(fault))?;
        if let Some(old) = volumes.iter().find(|v| v.name == name) {
            // it may have been cut off in the middle
            ignore_missing(site.hv.delete_volume(old).await)?;
        }
        failpoint!("create.before_seed");
        let length = image.len() as u64;
        let spec = VolumeSpec::Bytes { name: &name, length };
        let volume = match site.hv.create_volume(&site.pool, &spec.to_xml()).await {
            Ok(volume) => volume,
            Err(e) if e.is(code::STORAGE_VOL_EXIST) => return Err(busy(&order.id()).with_source(e)),
            Err(e) => return Err(e.into()),
        };
        failpoint!("create.after_seed_volume");
        let (parts, receiver) = tokio::sync::mpsc::channel(1);
        let feed = async move {
            // neither waits for long: an upload that has ended drops the receiver, and says why
            let _ = parts.send(UploadPart::Data(image.into())).await;
            let Ok(finish) = parts.reserve().await else { return Ok(()) };
            failpoint!("create.in_seed_upload");
            finish.send(UploadPart::Finish);
            Ok::<_, ProviderError>(())
        };
        let (fed, sent) = tokio::join!(feed, site.hv.upload(&volume, length, receiver, entry.budgets.upload_small));
        fed?;
        sent?;
        Ok(())
    }

    /// Starts the domain and, if all is well, writes `ready` at the same time as it asks how it went.
    pub(super) async fn start(&self, order: &Order, site: &Site, domain: &DomainRef, ready: Option<&Mark>) -> Result<state::RawState> {
        let id = order.id();
        match site.hv.start_domain(domain).await {
            Ok(()) => {}
            // active already
            Err(e) if e.is(code::OPERATION_INVALID) => {}
            Err(e) => return Err(self.why_not_started(order, site, e).await),
        }
        failpoint!("create.after_start");
        let (state, marked) = tokio::join!(site.hv.domain_state(domain), async {
            match ready {
                Some(mark) => {
                    failpoint!("create.before_ready");
                    self.write_mark(site, domain, mark).await?;
                    failpoint!("create.after_ready");
                    Ok(())
                }
                None => Ok::<_, ProviderError>(()),
            }
        });
        marked?;
        let deadline = Instant::now() + order.at.entry.budgets.settle;
        let mut raw = state?;
        loop {
            match state::map(raw, Phase::Ready) {
                (State::Running, _) => return Ok(raw),
                (State::Provisioning, _) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    raw = site.hv.domain_state(domain).await?;
                }
                (_, reason) => {
                    return Err(ProviderError::new(
                        Reason::StartFailed,
                        format!(
                            "domain {} was started on host {} and did not stay up ({}); see its log under /var/log/libvirt/qemu there",
                            id.name,
                            id.host,
                            state::describe(State::Stopped, reason)
                        ),
                    ));
                }
            }
        }
    }

    /// libvirt answers most start failures with one code; what it could not find is looked for.
    async fn why_not_started(&self, order: &Order, site: &Site, error: crate::hypervisor::CallError) -> ProviderError {
        if error.is(code::NO_DOMAIN) {
            return changed(&order.id()).with_source(error);
        }
        // both were there a moment ago: another daemon has taken one away
        for volume in [order.name.overlay_volume(), order.name.seed_volume()] {
            if site.hv.lookup_volume(&site.pool, &volume).await.is_err_and(|e| e.is(code::NO_STORAGE_VOL)) {
                return changed(&order.id()).with_source(error);
            }
        }
        // QEMU's own words, which no locale changes; domain capabilities say KVM is there when only its device file is
        if site.entry.virt_type == VirtType::Kvm && error.kind.to_string().to_ascii_lowercase().contains("kvm") {
            return preflight::kvm_unavailable(&site.entry, &site.host).with_source(error);
        }
        let original = ProviderError::from(error);
        if matches!(original.reason(), Reason::StartFailed | Reason::LibvirtError | Reason::HostRejected)
            && let Err(cause) = preflight::require_bridge(&*site.hv, &site.host).await
            && cause.reason() == Reason::BridgeMissing
        {
            return cause.with_source(original);
        }
        original
    }
}

/// A base that vanished under the overlay's creation is found missing by the next attempt.
fn vanished_base(error: ProviderError) -> ProviderError {
    if error.reason() == Reason::InstanceNotFound {
        return ProviderError::new(Reason::StateChanged, "a volume vanished while the instance was created; call again").with_source(error);
    }
    error
}

fn ignore_missing(result: crate::hypervisor::CallResult<()>) -> Result<()> {
    match result {
        Err(e) if !e.is(code::NO_STORAGE_VOL) => Err(e.into()),
        _ => Ok(()),
    }
}
