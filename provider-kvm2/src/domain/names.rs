//! Names of domains and of what belongs to them, and what is derived from them.
//!
//! A VM owns the volumes `<name>.qcow2` and `<name>-seed.iso`. Their suffixes
//! differ and `base-` is reserved for the image cache, so no two names share a
//! volume and no VM owns a base. UUID and MAC are functions of the identity: a
//! Create that is repeated defines the same domain again.

use std::fmt;

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

/// `<name>-seed.iso` and libvirt's own `<name>_VARS.fd` fit a file name of 255 bytes.
pub const MAX_NAME_LEN: usize = 240;
/// Longest uid and installation id; the contract's limit.
pub const MAX_IDENTITY_LEN: usize = 63;
/// Longest spec hash; opaque, any hex digest fits.
pub const MAX_SPEC_HASH_LEN: usize = 128;

/// Start of the names of base volumes, which no VM may have.
pub const BASE_PREFIX: &str = "base-";

const OVERLAY_SUFFIX: &str = ".qcow2";
const SEED_SUFFIX: &str = "-seed.iso";

/// Namespace of the UUIDs of our domains (a random UUID, fixed for ever: another one would make
/// every existing domain a stranger to its own Create).
const DOMAIN_NAMESPACE: Uuid = Uuid::from_u128(0x6d1c_52f7_0b1e_4c0a_9c5d_2f4b_7a90_e3d1);

/// A name that is valid as a domain name and as the stem of its volumes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VmName(String);

/// Why a text is no [`VmName`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameFault {
    #[error("it is empty")]
    Empty,
    #[error("it is longer than {MAX_NAME_LEN} bytes")]
    TooLong,
    #[error("only letters, digits, '.', '-' and '_' are allowed")]
    Character,
    #[error("only lower-case letters, digits, '.' and '-' are allowed")]
    CharacterOfNew,
    #[error("its first and last character must be a letter or digit")]
    Edge,
    #[error("names that begin with '{BASE_PREFIX}' are those of base images")]
    Reserved,
}

/// A volume that belongs to a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeRole {
    Overlay,
    Seed,
}

impl VmName {
    /// A name as it may be found on a host or in an id.
    pub fn parse(text: &str) -> Result<Self, NameFault> {
        if text.is_empty() {
            return Err(NameFault::Empty);
        }
        if text.len() > MAX_NAME_LEN {
            return Err(NameFault::TooLong);
        }
        if !text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_')) {
            return Err(NameFault::Character);
        }
        let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        if !edge(text.as_bytes().first()) || !edge(text.as_bytes().last()) {
            return Err(NameFault::Edge);
        }
        if text.starts_with(BASE_PREFIX) {
            return Err(NameFault::Reserved);
        }
        Ok(Self(text.to_owned()))
    }

    /// A name that a caller asks for: the contract allows no upper case and no underscore.
    pub fn parse_new(text: &str) -> Result<Self, NameFault> {
        let name = Self::parse(text)?;
        if text.bytes().any(|b| b.is_ascii_uppercase() || b == b'_') {
            return Err(NameFault::CharacterOfNew);
        }
        Ok(name)
    }

    /// The VM that a volume belongs to by its name; None for a base or a stranger.
    pub fn of_volume(volume: &str) -> Option<(Self, VolumeRole)> {
        let (stem, role) = match (volume.strip_suffix(SEED_SUFFIX), volume.strip_suffix(OVERLAY_SUFFIX)) {
            (Some(stem), _) => (stem, VolumeRole::Seed),
            (None, Some(stem)) => (stem, VolumeRole::Overlay),
            (None, None) => return None,
        };
        Some((Self::parse(stem).ok()?, role))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn overlay_volume(&self) -> String {
        format!("{}{OVERLAY_SUFFIX}", self.0)
    }

    pub fn seed_volume(&self) -> String {
        format!("{}{SEED_SUFFIX}", self.0)
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A uid as the contract allows it; compared without regard to case.
#[derive(Debug, Clone)]
pub struct Uid(String);

impl Uid {
    pub fn parse(text: &str) -> Result<Self, IdentityFault> {
        if text.is_empty() { Err(IdentityFault::Empty) } else { check_identity(text).map(|()| Self(text.to_owned())) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl PartialEq for Uid {
    fn eq(&self, other: &Self) -> bool {
        self.0.eq_ignore_ascii_case(&other.0)
    }
}

impl Eq for Uid {}

/// Why a text is no uid, installation id or spec hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdentityFault {
    #[error("it is empty")]
    Empty,
    #[error("it is longer than {limit} bytes")]
    TooLong { limit: usize },
    #[error("only letters, digits, '.', '-' and '_' are allowed")]
    Character,
    #[error("only printable ASCII characters without spaces are allowed")]
    Unprintable,
}

/// An installation id; empty is allowed: the installation without a name.
pub fn check_installation_id(text: &str) -> Result<(), IdentityFault> {
    check_identity(text)
}

/// A spec hash is opaque and only compared; empty is allowed.
pub fn check_spec_hash(text: &str) -> Result<(), IdentityFault> {
    if text.len() > MAX_SPEC_HASH_LEN {
        return Err(IdentityFault::TooLong { limit: MAX_SPEC_HASH_LEN });
    }
    if text.bytes().all(|b| b.is_ascii_graphic()) { Ok(()) } else { Err(IdentityFault::Unprintable) }
}

fn check_identity(text: &str) -> Result<(), IdentityFault> {
    if text.len() > MAX_IDENTITY_LEN {
        return Err(IdentityFault::TooLong { limit: MAX_IDENTITY_LEN });
    }
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    if text.bytes().all(allowed) { Ok(()) } else { Err(IdentityFault::Character) }
}

/// The MAC of a VM's NIC: `52:` (unicast, locally administered) and 40 bits of its identity. A VM
/// that is replaced under its name has another uid, so another MAC, and no stale lease.
pub fn mac_for(installation_id: &str, name: &VmName, uid: &str) -> String {
    let digest = identity_digest(&[installation_id, name.as_str(), &uid.to_ascii_lowercase()]);
    let [a, b, c, d, e, ..] = digest;
    format!("52:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}")
}

/// The UUID of a VM's domain. Defining it again is the same domain; another identity under the
/// same name is refused by libvirt itself.
pub fn domain_uuid(entry: &str, host: &str, installation_id: &str, name: &VmName, uid: &str) -> Uuid {
    let digest = identity_digest(&[entry, host, installation_id, name.as_str(), &uid.to_ascii_lowercase()]);
    Uuid::new_v5(&DOMAIN_NAMESPACE, &digest)
}

/// Every part is preceded by its length, so ("ab", "c") and ("a", "bc") differ.
fn identity_digest(parts: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn name(text: &str) -> VmName {
        VmName::parse(text).expect("a valid name")
    }

    #[rstest]
    #[case("a")]
    #[case("egress-1")]
    #[case("a..b")]
    #[case("Legacy_VM.3")]
    #[case("docker-29")]
    #[case("x-seed.iso")]
    #[case("x.qcow2")]
    #[case("database-1")]
    fn names_of_the_alphabet_are_names(#[case] text: &str) {
        assert_eq!(name(text).as_str(), text);
    }

    #[rstest]
    #[case("", NameFault::Empty)]
    #[case("-a", NameFault::Edge)]
    #[case("a.", NameFault::Edge)]
    #[case(".", NameFault::Edge)]
    #[case("a/b", NameFault::Character)]
    #[case("a b", NameFault::Character)]
    #[case("a\n", NameFault::Character)]
    #[case("é", NameFault::Character)]
    #[case("base-home-debian", NameFault::Reserved)]
    fn other_texts_are_refused_with_their_fault(#[case] text: &str, #[case] fault: NameFault) {
        assert_eq!(VmName::parse(text), Err(fault));
    }

    #[test]
    fn the_longest_name_makes_file_names_that_fit() {
        let longest = name(&"a".repeat(MAX_NAME_LEN));
        assert!(longest.seed_volume().len() <= 255);
        assert!(format!("{longest}_VARS.qcow2").len() <= 255, "libvirt's NVRAM file");
        assert_eq!(VmName::parse(&"a".repeat(MAX_NAME_LEN + 1)), Err(NameFault::TooLong));
    }

    #[test]
    fn a_new_name_is_lower_case_without_underscores() {
        assert!(VmName::parse_new("egress-1.a").is_ok());
        assert_eq!(VmName::parse_new("Egress"), Err(NameFault::CharacterOfNew));
        assert_eq!(VmName::parse_new("a_b"), Err(NameFault::CharacterOfNew));
    }

    #[rstest]
    #[case("a.qcow2", "a", VolumeRole::Overlay)]
    #[case("a-seed.iso", "a", VolumeRole::Seed)]
    #[case("a-seed.iso.qcow2", "a-seed.iso", VolumeRole::Overlay)]
    #[case("a.qcow2-seed.iso", "a.qcow2", VolumeRole::Seed)]
    fn a_volume_leads_back_to_its_vm(#[case] volume: &str, #[case] vm: &str, #[case] role: VolumeRole) {
        assert_eq!(VmName::of_volume(volume), Some((name(vm), role)));
    }

    #[rstest]
    #[case("base-home-debian-0a1b2c3d.qcow2")]
    #[case("debian.iso")]
    #[case(".qcow2")]
    #[case("a.raw")]
    fn bases_and_strangers_are_no_vms(#[case] volume: &str) {
        assert_eq!(VmName::of_volume(volume), None);
    }

    proptest! {
        #[test]
        fn volumes_of_two_names_never_collide(a in "[a-z0-9]([a-z0-9._-]{0,12}[a-z0-9])?(\\.qcow2|-seed\\.iso)?", b in "[a-z0-9]([a-z0-9._-]{0,12}[a-z0-9])?(\\.qcow2|-seed\\.iso)?") {
            let (Ok(a), Ok(b)) = (VmName::parse(&a), VmName::parse(&b)) else { return Ok(()) };
            prop_assert_ne!(a.overlay_volume(), b.seed_volume());
            prop_assert_eq!(a.overlay_volume() == b.overlay_volume(), a == b);
            prop_assert_eq!(a.seed_volume() == b.seed_volume(), a == b);
        }

        #[test]
        fn a_mac_is_unicast_and_locally_administered(installation in "[a-z]{0,8}", uid in "[a-z0-9-]{1,36}") {
            let mac = mac_for(&installation, &name("vm"), &uid);
            prop_assert!(mac.len() == 17 && mac.starts_with("52:"), "{}", mac);
            prop_assert_eq!(mac.to_ascii_lowercase(), mac);
        }
    }

    #[test]
    fn identity_decides_mac_and_uuid() {
        let vm = name("vm");
        assert_eq!(mac_for("i", &vm, "U1"), mac_for("i", &vm, "u1"), "a uid has no case");
        assert_ne!(mac_for("i", &vm, "u1"), mac_for("i", &vm, "u2"));
        assert_ne!(mac_for("ab", &name("c"), "u"), mac_for("a", &name("bc"), "u"));
        let uuid = |host| domain_uuid("home", host, "i", &vm, "u1");
        assert_eq!(uuid("hv1"), uuid("hv1"));
        assert_ne!(uuid("hv1"), uuid("hv2"));
        assert_eq!(uuid("hv1").get_version_num(), 5);
    }

    #[test]
    fn derived_values_are_those_of_the_first_release() {
        let vm = name("vm");
        // a change here orphans every domain that exists
        insta::assert_snapshot!(
            format!("{} {}", mac_for("cluster-1", &vm, "uid-1"), domain_uuid("home", "hv1", "cluster-1", &vm, "uid-1")),
            @"52:4b:9c:85:46:03 c6862fef-6315-54b4-9aa4-c584378b5e2a"
        );
    }

    #[rstest]
    #[case("", Err(IdentityFault::Empty))]
    #[case("a b", Err(IdentityFault::Character))]
    #[case("0a1b-2c", Ok(()))]
    fn uids_are_those_of_the_contract(#[case] text: &str, #[case] outcome: Result<(), IdentityFault>) {
        assert_eq!(Uid::parse(text).map(|_| ()), outcome);
    }

    #[test]
    fn identities_are_bounded() {
        assert_eq!(Uid::parse(&"a".repeat(64)), Err(IdentityFault::TooLong { limit: 63 }));
        assert_eq!(check_installation_id(""), Ok(()));
        assert_eq!(check_spec_hash("sha256:ab"), Ok(()));
        assert_eq!(check_spec_hash("a b"), Err(IdentityFault::Unprintable));
        assert_eq!(check_spec_hash(&"a".repeat(129)), Err(IdentityFault::TooLong { limit: 128 }));
    }

    #[test]
    fn uids_are_equal_without_regard_to_case() {
        assert_eq!(Uid::parse("AB-1"), Uid::parse("ab-1"));
    }
}
