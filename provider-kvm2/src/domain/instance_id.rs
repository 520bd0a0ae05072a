//! `hosts/<host>/domains/<name>`: the id that callers keep.
//!
//! An id says where to look, not whose the domain is: one of a foreign domain
//! parses, and the domain's mark decides.

use std::fmt;
use std::str::FromStr;

use super::VmName;
use super::names::NameFault;
use crate::config::is_identifier;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InstanceId {
    pub host: String,
    pub name: VmName,
}

/// Why a text is no [`InstanceId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdFault {
    #[error("an instance id has the form hosts/<host>/domains/<name>")]
    Shape,
    #[error("the host of an instance id is letters, digits, '.', '-' and '_'")]
    Host,
    #[error("the name in an instance id is not a name of an instance")]
    Name(#[source] NameFault),
}

impl InstanceId {
    pub fn new(host: impl Into<String>, name: VmName) -> Self {
        Self { host: host.into(), name }
    }

    /// Strict: four segments, the literals as they are, nothing before or after.
    pub fn parse(text: &str) -> Result<Self, IdFault> {
        let mut segments = text.split('/');
        let (Some("hosts"), Some(host), Some("domains"), Some(name), None) =
            (segments.next(), segments.next(), segments.next(), segments.next(), segments.next())
        else {
            return Err(IdFault::Shape);
        };
        if host.is_empty() || name.is_empty() {
            return Err(IdFault::Shape);
        }
        if !is_identifier(host) {
            return Err(IdFault::Host);
        }
        Ok(Self { host: host.to_owned(), name: VmName::parse(name).map_err(IdFault::Name)? })
    }
}

impl FromStr for InstanceId {
    type Err = IdFault;

    fn from_str(text: &str) -> Result<Self, IdFault> {
        Self::parse(text)
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hosts/{}/domains/{}", self.host, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case("", IdFault::Shape)]
    #[case("egress-1", IdFault::Shape)]
    #[case("hosts/hv1/domains", IdFault::Shape)]
    #[case("hosts/hv1/domains/", IdFault::Shape)]
    #[case("hosts//domains/a", IdFault::Shape)]
    #[case("hosts/hv1/domains/a/", IdFault::Shape)]
    #[case("hosts/hv1/domains/a/b", IdFault::Shape)]
    #[case("/hosts/hv1/domains/a", IdFault::Shape)]
    #[case("Hosts/hv1/domains/a", IdFault::Shape)]
    #[case("hosts/hv1/volumes/a", IdFault::Shape)]
    #[case("hosts/h v/domains/a", IdFault::Host)]
    #[case("hosts/.hv/domains/a", IdFault::Host)]
    #[case("hosts/hv1/domains/a b", IdFault::Name(NameFault::Character))]
    #[case("hosts/hv1/domains/..", IdFault::Name(NameFault::Edge))]
    #[case("hosts/hv1/domains/base-x", IdFault::Name(NameFault::Reserved))]
    fn anything_but_the_exact_form_is_refused(#[case] text: &str, #[case] fault: IdFault) {
        assert_eq!(InstanceId::parse(text), Err(fault));
    }

    #[test]
    fn the_id_of_a_foreign_domain_parses() {
        let id = InstanceId::parse("hosts/h/domains/docker-29").expect("well-formed");
        assert_eq!((id.host.as_str(), id.name.as_str()), ("h", "docker-29"));
    }

    proptest! {
        #[test]
        fn an_id_is_what_it_prints(host in "[a-z0-9][a-z0-9._-]{0,20}", name in "[a-zA-Z0-9]([a-z0-9._-]{0,30}[a-z0-9])?") {
            let Ok(name) = VmName::parse(&name) else { return Ok(()) };
            let id = InstanceId::new(host, name);
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }

        #[test]
        fn junk_never_panics(text in "(hosts|domains|/|\\PC){0,12}") {
            let _ = InstanceId::parse(&text);
        }
    }
}
