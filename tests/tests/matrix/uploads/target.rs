//! What happens to the host of an upload: before it, or while half of the image is there.

use egress_provider_proto::v1::ErrorReason as Reason;
use futures::future::join_all;
use lab_tests::{Answer, Outcome};

use super::room::{Filled, POOL};
use super::{By, Expected, Rig, have_volumes};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    FullBefore,
    /// The rest of the pool is taken behind libvirt's back.
    FillsUp,
    /// Somebody deletes the volume.
    VolumeDeleted,
    /// Somebody refreshes the pool.
    PoolRefreshed,
    InactiveBefore,
}

impl Target {
    pub(super) const ALL: [Self; 5] = [Self::FullBefore, Self::FillsUp, Self::VolumeDeleted, Self::PoolRefreshed, Self::InactiveBefore];

    fn by(self) -> By {
        if self == Self::VolumeDeleted { By::Plain } else { By::Room }
    }

    fn is_before(self) -> bool {
        matches!(self, Self::FullBefore | Self::InactiveBefore)
    }

    fn expected(self) -> Expected {
        match self {
            Self::FullBefore => Expected::Refused(&[Reason::PoolSpace], "free"),
            // the image has its room, the small volumes beside it may not
            Self::FillsUp => Expected::StoredOr(&[Reason::PoolSpace]),
            Self::VolumeDeleted => Expected::Refused(&[Reason::StateChanged], ""),
            Self::InactiveBefore => Expected::Refused(&[Reason::PoolNotActive], "virsh pool-start"),
            Self::PoolRefreshed => Expected::Stored,
        }
    }

    /// Mended when dropped.
    fn strike(self, rig: &Rig) -> Option<Filled> {
        let host = rig.host();
        match self {
            Self::FullBefore | Self::FillsUp => return Some(rig.room().fill()),
            Self::VolumeDeleted => {
                for volume in rig.bases(self.by()).iter().filter(|v| v.ends_with(".qcow2")) {
                    host.delete_volume("default", volume);
                }
            }
            Self::PoolRefreshed => drop(host.try_virsh(&["pool-refresh", POOL])),
            Self::InactiveBefore => drop(host.virsh(&["pool-destroy", POOL])),
        }
        None
    }

    /// Uploads at the same time, all struck at once.
    pub(super) async fn uploads(self, rig: &Rig, numbers: &[usize]) -> Vec<Outcome> {
        let by = self.by();
        rig.server.close_gate();
        let half = rig.bytes.len() / 2;
        for n in numbers {
            let answer = if self.is_before() { Answer::Whole } else { Answer::GateAt(half) };
            rig.server.serve(&format!("i{n}"), rig.bytes.clone(), [answer]);
        }
        let mut broken = if self.is_before() { self.strike(rig) } else { None };
        let uploads = join_all(numbers.iter().map(|n| async move { rig.create(by, &rig.vm(*n), &format!("i{n}")).await }));
        let strike = async {
            if !self.is_before() {
                have_volumes(rig, by, numbers.len()).await;
                broken = self.strike(rig);
                rig.server.open_gate();
            }
        };
        let (results, ()) = tokio::join!(uploads, strike);
        drop(broken);
        // fails where it is active
        let _ = rig.host().try_virsh(&["pool-start", POOL]);
        let judged = numbers.iter().zip(results).map(|(n, result)| async move { rig.judge(by, *n, result, self.expected()).await });
        join_all(judged).await
    }
}
