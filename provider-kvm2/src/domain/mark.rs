//! The mark: the metadata element that says a domain is ours, and whose.
//!
//! Namespace, element and the first three children are the predecessor's, so its
//! domains are adopted as they are; it ignores the children that we add, and we
//! ignore those that we do not know. The namespace selects the element; libvirt
//! returns it without the declaration, so reading matches local names only.
//!
//! ```text
//! managed, uid, createdAt                       both
//! phase, installationId, specHash, entry,       ours
//! imageKey, base, baseDigest, owner, attemptAt
//! ```

use std::fmt;
use std::time::Duration;

use jiff::{Timestamp, Unit};

use super::xml::{Element, XmlFault};

/// The namespace URI of the mark: the predecessor's, never changed.
pub const NAMESPACE: &str = "https://gitea.home.hrajfrisbee.cz/kacerr/egress-proxies-operator/kvm2";
/// The prefix under which libvirt stores the element when it is set on a defined domain.
pub const PREFIX: &str = "kvm2";

const ELEMENT: &str = "instance";
/// Largest element that is read; one of ours has about 700 bytes.
const MAX_MARK: usize = 16 << 10;
/// Longest value that is read: a volume name is the longest that is written.
const MAX_VALUE: usize = 255;

/// How far the making of an instance has come; kept on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Its Create has not reached its end.
    Creating,
    Ready,
    /// Its Delete has begun.
    Deleting,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
            Self::Deleting => "deleting",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether the element claims the domain for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    Managed,
    /// The element is there and says otherwise: a person took the domain out of our hands.
    Released,
}

/// Texts are empty where the mark does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    pub claim: Claim,
    pub uid: String,
    /// None where there is none, or none that can be read.
    pub created_at: Option<Timestamp>,
    /// Ready where the mark has none: the predecessor wrote none.
    pub phase: Phase,
    pub installation_id: String,
    pub spec_hash: String,
    /// The provider entry it was made for.
    pub entry: String,
    /// Catalogue key of its image at the time; empty for a URL.
    pub image_key: String,
    /// The base volume that its overlay backs onto.
    pub base: String,
    /// SHA-256 of that base, 64 hex digits.
    pub base_digest: String,
    /// The daemon that works, or worked last, on the instance: stable over its restarts.
    pub owner: String,
    /// When that work began.
    pub attempt_at: Option<Timestamp>,
}

/// Why a mark cannot be read. A domain with such a mark is neither ours for certain nor anyone else's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MarkFault {
    #[error("the metadata element is not usable")]
    Xml(#[source] XmlFault),
    #[error("the metadata element is not <{ELEMENT}> of our namespace")]
    Foreign,
    #[error("<{0}> appears more than once")]
    Repeated(&'static str),
    #[error("<{0}> is too long or holds characters that are not printable ASCII")]
    Value(&'static str),
    #[error("<phase> is none of creating, ready, deleting")]
    Phase,
}

impl Mark {
    /// Reads the element that libvirt returns for [`NAMESPACE`]. A `createdAt` later than `now` is
    /// taken for `now`: a host whose clock is ahead must not keep an orphan alive.
    pub fn parse(element: &str, now: Timestamp) -> Result<Self, MarkFault> {
        let root = Element::parse(element, MAX_MARK).map_err(MarkFault::Xml)?;
        let namespace = root.attribute("xmlns");
        if root.name() != ELEMENT || namespace.is_some_and(|ns| ns != NAMESPACE) {
            return Err(MarkFault::Foreign);
        }
        let value = |name| value(&root, name);
        let claim = if value("managed")?.eq_ignore_ascii_case("true") { Claim::Managed } else { Claim::Released };
        let created_at = value("createdAt")?.to_ascii_uppercase().parse::<Timestamp>().ok();
        let phase = match value("phase")?.to_ascii_lowercase().as_str() {
            "" | "ready" => Phase::Ready,
            "creating" => Phase::Creating,
            "deleting" => Phase::Deleting,
            _ => return Err(MarkFault::Phase),
        };
        Ok(Self {
            claim,
            uid: value("uid")?.to_owned(),
            created_at: created_at.map(|at| at.min(now)),
            phase,
            installation_id: value("installationId")?.to_owned(),
            spec_hash: value("specHash")?.to_owned(),
            entry: value("entry")?.to_owned(),
            image_key: value("imageKey")?.to_owned(),
            base: value("base")?.to_owned(),
            base_digest: value("baseDigest")?.to_ascii_lowercase(),
            owner: value("owner")?.to_owned(),
            // not clamped: taken for now at every reading, an attempt dated ahead would stay fresh for ever
            attempt_at: value("attemptAt")?.to_ascii_uppercase().parse().ok(),
        })
    }

    pub fn is_managed(&self) -> bool {
        self.claim == Claim::Managed
    }

    /// Whether the attempt began less than `age` ago. One without a time is not fresh, nor is one
    /// dated further ahead than that.
    pub fn is_fresh(&self, now: Timestamp, age: Duration) -> bool {
        self.attempt_at.is_some_and(|at| now.duration_since(at).unsigned_abs() < age)
    }

    /// Whether the mark names this uid; white space around it and case do not count.
    pub fn has_uid(&self, uid: &str) -> bool {
        self.uid.eq_ignore_ascii_case(uid.trim())
    }

    /// Whether the mark names another uid. One without a uid names nobody and may be adopted.
    pub fn has_other_uid(&self, uid: &str) -> bool {
        !self.uid.is_empty() && !self.has_uid(uid)
    }

    /// Whether the domain is this installation's. A mark without an installation (the
    /// predecessor's) is anybody's who knows its uid.
    pub fn is_of_installation(&self, installation_id: &str) -> bool {
        self.installation_id.is_empty() || self.installation_id == installation_id.trim()
    }

    /// The element with its namespace, for a domain document.
    pub fn to_element(&self) -> String {
        self.element().with("xmlns", NAMESPACE).to_xml()
    }

    /// The element without its namespace, for `set_domain_metadata`, which adds it.
    pub fn to_metadata(&self) -> String {
        self.element().to_xml()
    }

    pub(super) fn to_tree(&self) -> Element {
        self.element().with("xmlns", NAMESPACE)
    }

    fn element(&self) -> Element {
        let managed = match self.claim {
            Claim::Managed => "true",
            Claim::Released => "false",
        };
        // whole seconds: all that the predecessor wrote
        let created_at = self.created_at.map(|at| at.round(Unit::Second).unwrap_or(at).to_string()).unwrap_or_default();
        let attempt_at = self.attempt_at.map(|at| at.round(Unit::Second).unwrap_or(at).to_string()).unwrap_or_default();
        let own = [
            ("uid", self.uid.as_str()),
            ("createdAt", &created_at),
            ("phase", self.phase.as_str()),
            ("installationId", &self.installation_id),
            ("specHash", &self.spec_hash),
            ("entry", &self.entry),
            ("imageKey", &self.image_key),
            ("base", &self.base),
            ("baseDigest", &self.base_digest),
            ("owner", &self.owner),
            ("attemptAt", &attempt_at),
        ];
        Element::new(ELEMENT)
            .and(Element::leaf("managed", managed))
            .and_all(own.into_iter().filter(|(_, value)| !value.is_empty()).map(|(name, value)| Element::leaf(name, value)))
    }
}

/// Whether two identities agree: white space and case do not count, and an empty one agrees with all.
pub fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.trim(), b.trim());
    a.is_empty() || b.is_empty() || a.eq_ignore_ascii_case(b)
}

/// The trimmed text of a child, empty where there is none.
fn value<'a>(root: &'a Element, name: &'static str) -> Result<&'a str, MarkFault> {
    let mut found = root.children(name);
    let text = found.next().map_or("", Element::text);
    if found.next().is_some() {
        return Err(MarkFault::Repeated(name));
    }
    if text.len() > MAX_VALUE || !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(MarkFault::Value(name));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn at(text: &str) -> Timestamp {
        text.parse().expect("a time")
    }

    fn now() -> Timestamp {
        at("2026-01-02T03:04:05Z")
    }

    fn parse(element: &str) -> Result<Mark, MarkFault> {
        Mark::parse(element, now())
    }

    #[test]
    fn a_mark_of_the_predecessor_is_a_ready_instance() {
        let mark =
            parse("<instance>\n  <managed>true</managed>\n  <uid>u-1</uid>\n  <createdAt>2025-09-04T10:00:00Z</createdAt>\n</instance>")
                .expect("readable");
        assert!(mark.is_managed() && mark.has_uid("u-1") && mark.is_of_installation("any"));
        assert_eq!((mark.phase, mark.created_at), (Phase::Ready, Some(at("2025-09-04T10:00:00Z"))));
        assert_eq!(mark.installation_id, "");
    }

    /// As libvirt 11.3 answers after a define, and stores after a metadata call with a prefix.
    #[test]
    fn a_mark_is_read_with_and_without_a_prefix() {
        let mark = Mark { phase: Phase::Deleting, ..parse("<instance><managed>true</managed><uid>u</uid></instance>").expect("readable") };
        let prefixed = mark.to_metadata().replace("</", "</kvm2:").replace("  <", "  <kvm2:");
        let prefixed = prefixed.replacen("<instance", &format!("<kvm2:instance xmlns:kvm2=\"{NAMESPACE}\""), 1);
        let prefixed = prefixed.replace("kvm2:/", "/");
        assert!(prefixed.contains("<kvm2:uid>u</kvm2:uid>"), "{prefixed}");
        assert_eq!(parse(&prefixed), Ok(mark));
    }

    #[test]
    fn white_space_and_case_do_not_count() {
        let mark = parse("<k:instance xmlns:k='x'><managed>\n TRUE </managed><uid> 0A1B </uid><createdAt> 2025-09-04t10:00:00z </createdAt><phase> Creating</phase><baseDigest>AB</baseDigest></k:instance>")
            .expect("readable");
        assert!(mark.is_managed() && mark.has_uid(" 0a1b\n"));
        assert_eq!((mark.phase, mark.base_digest.as_str()), (Phase::Creating, "ab"));
        assert_eq!(mark.created_at, Some(at("2025-09-04T10:00:00Z")));
    }

    #[test]
    fn a_mark_without_a_uid_is_nobody_elses() {
        let nameless = parse("<instance><managed>true</managed></instance>").expect("readable");
        assert!(!nameless.has_uid("u-1") && !nameless.has_other_uid("u-1"));
        let owned = parse("<instance><managed>true</managed><uid>u-2</uid></instance>").expect("readable");
        assert!(owned.has_other_uid("u-1") && !owned.has_other_uid("U-2"));
    }

    #[rstest]
    #[case::later_than_now("2030-01-01T00:00:00Z", Some("2026-01-02T03:04:05Z"))]
    #[case::unreadable("yesterday", None)]
    #[case::empty("", None)]
    #[case::with_an_offset("2025-01-01T01:00:00+01:00", Some("2025-01-01T00:00:00Z"))]
    fn created_at_is_never_in_the_future(#[case] text: &str, #[case] expected: Option<&str>) {
        let mark = parse(&format!("<instance><managed>true</managed><createdAt>{text}</createdAt></instance>")).expect("readable");
        assert_eq!(mark.created_at, expected.map(at));
    }

    #[rstest]
    #[case("<instance/>")]
    #[case("<instance><managed>false</managed></instance>")]
    #[case("<instance><managed>1</managed></instance>")]
    #[case("<instance><x><managed>true</managed></x></instance>")]
    fn without_managed_true_a_domain_is_not_ours(#[case] element: &str) {
        assert!(!parse(element).expect("readable").is_managed());
    }

    #[rstest]
    #[case::other_element("<vm><managed>true</managed></vm>", MarkFault::Foreign)]
    #[case::other_namespace("<instance xmlns='urn:kvm'><managed>true</managed></instance>", MarkFault::Foreign)]
    #[case::two_uids("<instance><uid>a</uid><uid>b</uid></instance>", MarkFault::Repeated("uid"))]
    #[case::phase_of_another_version("<instance><phase>resizing</phase></instance>", MarkFault::Phase)]
    #[case::control_characters("<instance><uid>a&#127;b</uid></instance>", MarkFault::Value("uid"))]
    #[case::document_type("<!DOCTYPE instance><instance/>", MarkFault::Xml(XmlFault::DocumentType))]
    fn what_cannot_be_trusted_is_a_fault(#[case] element: &str, #[case] fault: MarkFault) {
        assert_eq!(parse(element), Err(fault));
    }

    #[test]
    fn a_mark_is_bounded() {
        let long = format!("<instance><uid>{}</uid></instance>", "a".repeat(MAX_VALUE + 1));
        assert_eq!(parse(&long), Err(MarkFault::Value("uid")));
        let huge = format!("<instance><other>{}</other></instance>", "a".repeat(MAX_MARK));
        assert_eq!(parse(&huge), Err(MarkFault::Xml(XmlFault::TooLong { limit: MAX_MARK })));
    }

    #[test]
    fn an_attempt_is_fresh_for_its_time_and_without_a_time_never() {
        let mut mark = parse("<instance><attemptAt>2026-01-02T03:00:00Z</attemptAt></instance>").expect("readable");
        assert!(mark.is_fresh(now(), Duration::from_secs(246)));
        assert!(!mark.is_fresh(now(), Duration::from_secs(245)));
        mark.attempt_at = None;
        assert!(!mark.is_fresh(now(), Duration::MAX));
    }

    #[test]
    fn an_attempt_dated_far_ahead_is_not_fresh_and_one_slightly_ahead_is() {
        let ahead = |at| parse(&format!("<instance><attemptAt>{at}</attemptAt></instance>")).expect("readable");
        assert!(!ahead("2030-01-01T00:00:00Z").is_fresh(now(), Duration::from_secs(30)));
        assert!(ahead("2026-01-02T03:04:10Z").is_fresh(now(), Duration::from_secs(30)));
    }

    #[rstest]
    #[case("a", " A\n", true)]
    #[case("", "x", true)]
    #[case("x", "", true)]
    #[case("a", "b", false)]
    fn identities_agree_without_case_and_with_nothing(#[case] a: &str, #[case] b: &str, #[case] agree: bool) {
        assert_eq!(same(a, b), agree);
    }

    fn text() -> impl Strategy<Value = String> {
        "[!-~]{0,63}"
    }

    prop_compose! {
        fn mark()(
            managed: bool, phase in 0..3, seconds in proptest::option::of(0i64..1_700_000_000),
            uid in text(), installation_id in text(), spec_hash in text(), entry in text(), image_key in text(), base in text(), base_digest in "([0-9a-f]{64})?",
            owner in text(), attempt in proptest::option::of(0i64..1_700_000_000),
        ) -> Mark {
            Mark {
                claim: if managed { Claim::Managed } else { Claim::Released },
                phase: [Phase::Creating, Phase::Ready, Phase::Deleting][phase as usize],
                created_at: seconds.and_then(|s| Timestamp::from_second(s).ok()),
                attempt_at: attempt.and_then(|s| Timestamp::from_second(s).ok()),
                uid, installation_id, spec_hash, entry, image_key, base, base_digest, owner,
            }
        }
    }

    proptest! {
        #[test]
        fn a_mark_survives_writing_and_reading(mark in mark()) {
            prop_assert_eq!(parse(&mark.to_element()), Ok(mark.clone()));
            prop_assert_eq!(parse(&mark.to_metadata()), Ok(mark));
        }

        #[test]
        fn junk_never_panics(junk in "(<instance>|</instance>|<uid>|</uid>|&amp;|&#9;|\\PC){0,40}") {
            let _ = parse(&junk);
        }
    }
}
