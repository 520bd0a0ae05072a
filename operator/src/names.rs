//! Names and digests that are derived, so that they are the same after every restart.

use sha2::{Digest, Sha256};

use crate::crd::proxy::Placement;

/// The name of a Proxy's VM at its provider: `px-` and the UID of the Proxy. A Proxy that is deleted and made again has
/// another UID, so its VM never meets the old one.
#[must_use]
pub fn instance_name(uid: &str) -> String {
    format!("px-{}", uid.to_lowercase())
}

/// Digest of everything that makes a VM what it is; a VM with another one is replaced. Each part goes in with its
/// length, so that no two specs share their bytes.
#[must_use]
pub fn spec_hash(placement: &Placement, user_data: Option<&[u8]>) -> String {
    let Placement { zone, region, machine_type, image } = placement;
    let mut digest = Sha256::new();
    for part in [zone, region, machine_type, image] {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    if let Some(data) = user_data {
        digest.update(data);
    }
    format!("v1-{}", hex::encode(digest.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_spec_changes_its_hash_and_none_can_stand_for_another() {
        let placement = |zone: &str, region: &str, machine: &str, image: &str| Placement {
            zone: zone.into(),
            region: region.into(),
            machine_type: machine.into(),
            image: image.into(),
        };
        let all = [
            spec_hash(&placement("a", "", "m", "i"), None),
            spec_hash(&placement("", "a", "m", "i"), None),
            spec_hash(&placement("a", "", "mi", ""), None),
            spec_hash(&placement("a", "", "m", "i"), Some(b"x")),
            spec_hash(&placement("a", "", "m", "ix"), None),
        ];
        for (n, one) in all.iter().enumerate() {
            assert!(all[n + 1..].iter().all(|other| other != one), "{n}");
        }
        assert_eq!(all[0], spec_hash(&placement("a", "", "m", "i"), None));
    }

    #[test]
    fn a_name_is_what_the_contract_takes() {
        let name = instance_name("3F2504E0-4F89-11D3-9A0C-0305E82C3301");
        assert_eq!(name, "px-3f2504e0-4f89-11d3-9a0c-0305e82c3301");
    }
}
