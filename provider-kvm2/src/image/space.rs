//! Whether something fits into a pool.
//!
//! libvirt's `available` is what root can use; QEMU does not run as root, and a
//! file system that fills up pauses every guest on it. So a reserve stays free.

use crate::config::PoolReserve;
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::classify::is_pool_job;
use crate::hypervisor::{Hypervisor, PoolInfo, PoolRef};

/// The pool's numbers after a refresh: without one libvirt does not see what other
/// programs have written.
pub async fn fresh_info(hv: &dyn Hypervisor, pool: &PoolRef) -> Result<PoolInfo> {
    match hv.refresh_pool(pool).await {
        Ok(()) => {}
        // libvirt refuses a refresh while volumes are being built; the numbers are then a little old, no more
        Err(e) if is_pool_job(&e) => {
            tracing::debug!(host = hv.host(), pool = %pool.name, error = %ProviderError::from(e).chain(), "pool not refreshed");
        }
        Err(e) => return Err(e.into()),
    }
    let info = hv.pool_info(pool).await?;
    if info.state != PoolInfo::RUNNING {
        let text = format!("pool {} of host {} is not active; start it with `virsh pool-start {0}`", pool.name, hv.host());
        return Err(ProviderError::new(Reason::PoolNotActive, text).on_host(hv.host()).with_meta("pool", &pool.name));
    }
    Ok(info)
}

/// Refuses what would leave less than the reserve.
pub fn check(host: &str, pool: &str, info: &PoolInfo, reserve: PoolReserve, needed: u64) -> Result<()> {
    let kept = reserve.bytes(info.capacity);
    if needed.saturating_add(kept) <= info.available {
        return Ok(());
    }
    let text = format!(
        "pool {pool} of host {host} has no room: {} are available, {} of them stay in reserve, {} are needed; free some or lower poolReserveGiB",
        human(info.available),
        human(kept),
        human(needed)
    );
    let e = ProviderError::new(Reason::PoolSpace, text).on_host(host).with_meta("pool", pool);
    Err(e.with_meta("available_bytes", info.available).with_meta("reserve_bytes", kept).with_meta("needed_bytes", needed))
}

/// GiB with two decimals, or MiB where that would say too little.
pub fn human(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    if bytes >= GIB {
        let hundredths = u128::from(bytes) * 100 / u128::from(GIB);
        format!("{}.{:02} GiB", hundredths / 100, hundredths % 100)
    } else {
        format!("{} MiB", bytes.div_ceil(1 << 20))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::memory::MemoryHost;
    use crate::hypervisor::{CallFailure, code};

    const GIB: u64 = 1 << 30;

    fn info(capacity: u64, available: u64) -> PoolInfo {
        PoolInfo { state: PoolInfo::RUNNING, capacity, allocation: capacity - available, available }
    }

    #[test]
    fn what_would_eat_into_the_reserve_is_refused_with_all_numbers() {
        let pool = info(100 * GIB, 12 * GIB);
        check("hv1", "vms", &pool, PoolReserve::FivePercent, 7 * GIB).expect("7 of 12 leaves 5");
        let e = check("hv1", "vms", &pool, PoolReserve::FivePercent, 7 * GIB + 1).unwrap_err();
        assert_eq!(e.reason(), Reason::PoolSpace);
        for part in ["vms", "hv1", "12.00 GiB", "5.00 GiB", "7.00 GiB"] {
            assert!(e.message().contains(part), "{part} is missing in: {e}");
        }
        check("hv1", "vms", &pool, PoolReserve::Bytes(0), 12 * GIB).expect("no reserve, all of it");
        assert!(check("hv1", "vms", &pool, PoolReserve::Bytes(u64::MAX), 1).is_err(), "no sum wraps");
    }

    #[tokio::test]
    async fn what_grew_behind_libvirts_back_is_counted() {
        let host = MemoryHost::new("hv1");
        let link = host.link();
        let pool = link.lookup_pool("default").await.unwrap();
        host.grow_behind_the_back("default", 40 * GIB);
        assert_eq!(fresh_info(&*link, &pool).await.unwrap().available, 60 * GIB);
    }

    #[tokio::test]
    async fn a_refresh_that_is_refused_for_a_running_job_is_not_fatal() {
        let host = MemoryHost::new("hv1");
        let link = host.link();
        let pool = link.lookup_pool("default").await.unwrap();
        let busy = CallFailure::Libvirt { code: code::INTERNAL_ERROR, domain: 18, message: "asynchronous jobs running".into() };
        host.fail_next("refresh_pool", busy);
        assert_eq!(fresh_info(&*link, &pool).await.unwrap().available, 100 * GIB);
    }

    #[tokio::test]
    async fn a_pool_that_is_not_active_is_named() {
        let host = MemoryHost::new("hv1");
        let link = host.link();
        let pool = link.lookup_pool("default").await.unwrap();
        host.stop_pool("default");
        let e = fresh_info(&*link, &pool).await.unwrap_err();
        assert_eq!(e.reason(), Reason::PoolNotActive);
    }
}
