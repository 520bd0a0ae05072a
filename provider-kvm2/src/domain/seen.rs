//! The note on a running guest that its addresses have been known.
//!
//! It lives in the running guest's document only, so it outlasts this daemon and libvirtd, and is
//! gone when the guest stops: the next boot starts without an address. A guest whose agent falls
//! silent is thereby told from one that has not come up yet, by every daemon.

use super::xml::Element;

/// Beside the mark, which has a namespace of its own.
pub const NAMESPACE: &str = "https://gitea.home.hrajfrisbee.cz/kacerr/egress-proxies-operator/kvm2/seen";
pub const PREFIX: &str = "kvm2seen";
/// The whole note.
pub const ELEMENT: &str = "<addressKnown/>";

/// Whether a live document has the note.
pub fn is_noted(xml: &str) -> bool {
    Element::parse_document(xml, "domain").is_ok_and(|root| root.find(&["metadata", "addressKnown"]).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_note_in_the_metadata_counts() {
        let live =
            format!("<domain type='kvm'><metadata><m:instance xmlns:m='u'/><s:addressKnown xmlns:s='{NAMESPACE}'/></metadata></domain>");
        assert!(is_noted(&live));
        for other in ["<domain/>", "<domain><metadata/></domain>", "<domain><addressKnown/></domain>", "junk"] {
            assert!(!is_noted(other), "{other}");
        }
    }
}
