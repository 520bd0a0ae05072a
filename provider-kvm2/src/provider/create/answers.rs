//! What a Create answers when it does not make the instance: who has the name, what
//! does not fit, how far the work has come.

use std::time::Duration;

use super::Order;
use crate::domain::InstanceId;
use crate::domain::mark::{self, Mark};
use crate::domain::state::{self, State, StateReason};
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::VolumeRef;
use crate::image::Base;
use crate::provider::jobs::{Job, Step, Terms};
use crate::provider::sites::Site;

/// Nothing else is known of when a busy name will be free.
pub(super) const BUSY_RETRY: Duration = Duration::from_secs(2);
/// A pull reports progress in seconds, not in milliseconds.
const PULL_RETRY: Duration = Duration::from_secs(5);

/// The caller's wait is over; the work goes on.
pub(super) fn still_at(step: &Step, id: &InstanceId) -> ProviderError {
    let error = match step {
        Step::PullingImage(pull) => {
            let status = pull.status();
            let total = status.bytes_total.map_or_else(|| "an unannounced number of".to_owned(), |t| t.to_string());
            let error = ProviderError::new(
                Reason::ImagePullInProgress,
                format!(
                    "image {} is being fetched to host {}: {} of {total} bytes; the work goes on, call Create again with the same key",
                    status.key, id.host, status.bytes_done
                ),
            )
            .retry_after(PULL_RETRY)
            .with_meta("bytes_done", status.bytes_done);
            match status.bytes_total {
                Some(total) => error.with_meta("bytes_total", total),
                None => error,
            }
        }
        step => ProviderError::new(
            Reason::CallTimeout,
            format!(
                "creating instance {id} takes longer than max_wait; the work goes on (now: {}), call Create again with the same key",
                step.label()
            ),
        )
        .retry_after(BUSY_RETRY),
    };
    error.with_meta("step", step.label()).on_host(&id.host).on_instance(id)
}

pub(super) fn may_join(job: &Job, terms: &Terms, id: &InstanceId) -> Result<()> {
    let running = &job.terms;
    if !mark::same(&running.key.uid, &terms.key.uid) || !mark::same(&running.key.installation_id, &terms.key.installation_id) {
        return Err(owned_by_other(id, &running.key.uid, &terms.key.uid));
    }
    if !mark::same(&running.spec_hash, &terms.spec_hash) || running.host != terms.host {
        return Err(spec_conflict(id, &running.spec_hash, &terms.spec_hash));
    }
    if job.cancel.is_cancelled() {
        return Err(busy(id));
    }
    Ok(())
}

pub(super) fn owned_by_caller(order: &Order, mark: &Mark, id: &InstanceId) -> Result<()> {
    if !mark::same(&order.key.uid, &mark.uid) {
        return Err(owned_by_other(id, &mark.uid, &order.key.uid));
    }
    if !mark::same(&order.key.installation_id, &mark.installation_id) {
        let message = format!(
            "instance {id} belongs to installation {}, this request comes from {}; choose another name",
            mark.installation_id, order.key.installation_id
        );
        return Err(ProviderError::new(Reason::NameOwnedByOtherUid, message).with_meta("owner_installation_id", &mark.installation_id));
    }
    if !mark::same(&order.spec_hash, &mark.spec_hash) {
        return Err(spec_conflict(id, &mark.spec_hash, &order.spec_hash));
    }
    Ok(())
}

pub(super) fn owned_by_other(id: &InstanceId, owner: &str, caller: &str) -> ProviderError {
    ProviderError::new(
        Reason::NameOwnedByOtherUid,
        format!(
            "instance {id} belongs to uid {owner}, this request is for uid {caller}; choose another name, or delete the other one first"
        ),
    )
    .with_meta("owner_uid", owner)
}

pub(super) fn spec_conflict(id: &InstanceId, existing: &str, asked: &str) -> ProviderError {
    ProviderError::new(
        Reason::SpecConflict,
        format!(
            "instance {id} exists with another spec (hash {existing}, asked for {asked}); delete it before it is created with the new one"
        ),
    )
    .with_meta("existing_spec_hash", existing)
}

pub(super) fn paused(id: &InstanceId, reason: StateReason) -> ProviderError {
    ProviderError::new(
        Reason::PausedByAdmin,
        format!(
            "instance {id} exists and is paused ({}); resume it on the host (virsh resume {}) or delete it",
            state::describe(State::Paused, reason),
            id.name
        ),
    )
    .with_meta("state_reason", reason.as_str_name())
}

pub(super) fn busy(id: &InstanceId) -> ProviderError {
    ProviderError::new(Reason::OperationInProgress, format!("another operation is at work on {id}; ask again in a moment"))
        .retry_after(BUSY_RETRY)
}

pub(in crate::provider) fn changed(id: &InstanceId) -> ProviderError {
    ProviderError::new(Reason::StateChanged, format!("{id} was changed by someone else in the middle of the call; call again"))
        .retry_after(BUSY_RETRY)
}

pub(super) fn shutting_down() -> ProviderError {
    ProviderError::new(Reason::ShuttingDown, "this daemon is shutting down; call again when its successor serves").retry_after(BUSY_RETRY)
}

/// Volumes of the VM's names without a domain: not ours to overwrite.
pub(super) fn refuse_foreign_volumes(order: &Order, site: &Site, volumes: &[VolumeRef]) -> Result<()> {
    let names = [order.name.overlay_volume(), order.name.seed_volume()];
    match volumes.iter().find(|v| names.contains(&v.name)) {
        None => Ok(()),
        Some(volume) => Err(ProviderError::new(
            Reason::VolumeConflict,
            format!(
                "pool {} on host {} holds a volume {} that no domain of that name uses; look what it is, then remove it there (virsh vol-delete {} --pool {})",
                site.host.pool, site.host.name, volume.name, volume.name, site.host.pool
            ),
        )
        .with_meta("volume", &volume.name)),
    }
}

pub(super) fn fits(order: &Order, base: &Base) -> Result<()> {
    let disk = order.at.entry.disk_bytes();
    if base.virtual_size <= disk {
        return Ok(());
    }
    Err(ProviderError::invalid(
        Reason::DiskTooSmall,
        "placement.image",
        format!(
            "image {} is a disk of {} bytes and VMs of entry {} get {disk} bytes; raise diskSizeGb to at least {}, or use a smaller image",
            order.at.image.key,
            base.virtual_size,
            order.at.entry.name,
            base.virtual_size.div_ceil(1 << 30)
        ),
    )
    .with_meta("image_bytes", base.virtual_size)
    .with_meta("disk_bytes", disk))
}
