//! Whether cloud-init would use a configured vendor document at all.
//!
//! cloud-init tells documents apart by how they begin and drops, with one line in
//! the guest's log, what it does not know. So that is found here, at load.

use super::GuestAgent;

/// How a document begins that cloud-init knows, whatever its version.
const KNOWN: &[&str] = &[
    "#cloud-config",
    "#cloud-config-archive",
    "#!",
    "#include",
    "#include-once",
    "#cloud-boothook",
    "#part-handler",
    "## template: jinja",
];

/// How far cloud-init looks for `MIME-Version:` to decide that a document is MIME, in bytes.
const MIME_WINDOW: usize = 4096;

/// Why cloud-init would drop a vendor document, or change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Dropped {
    #[error("cloud-init drops a document that does not begin with one of: {}; put the header in the very first line", KNOWN.join(", "))]
    UnknownHeader,
    #[error(
        "a MIME document is dropped, because it becomes one part of a multipart and cloud-init does not look into nested ones; \
         configure one #cloud-config, script or #include instead, or set installGuestAgent: false"
    )]
    NestedMime,
    #[error(
        "cloud-init takes a document with MIME-Version: in its first {MIME_WINDOW} bytes for MIME, which breaks its text; move or remove it"
    )]
    TakenForMime,
    #[error("a jinja template needs a second line with the header of what it makes, such as #cloud-config")]
    TemplateOfNothing,
}

/// `Ok` where cloud-init would use the document: with the guest agent as one part of a multipart, otherwise as it is.
pub fn check(document: &str, agent: GuestAgent) -> Result<(), Dropped> {
    let first = document.lines().next().unwrap_or_default();
    let lower = document.trim_start().to_ascii_lowercase();
    let is_mime = lower.starts_with("mime-version:") || lower.starts_with("content-type:") || lower.starts_with("from ");
    match (is_mime, agent, mime_in_window(document)) {
        (true, GuestAgent::Install, _) => return Err(Dropped::NestedMime),
        (true, GuestAgent::Leave, true) => return Ok(()),
        (true, GuestAgent::Leave, false) => return Err(Dropped::UnknownHeader),
        (false, GuestAgent::Leave, true) => return Err(Dropped::TakenForMime),
        // as a part it is base64 and cannot be mistaken
        (false, _, _) => {}
    }
    if let Some(rest) = document.strip_prefix("## template: jinja") {
        // a template is rendered first; its result is looked at again
        let inner = rest.split_once('\n').map_or("", |(_, inner)| inner);
        let known = KNOWN.iter().any(|header| begins(inner, header)) && !inner.starts_with("## template");
        return if known { Ok(()) } else { Err(Dropped::TemplateOfNothing) };
    }
    if KNOWN.iter().any(|header| begins(first, header)) { Ok(()) } else { Err(Dropped::UnknownHeader) }
}

fn mime_in_window(document: &str) -> bool {
    let start = &document.as_bytes()[..document.len().min(MIME_WINDOW)];
    String::from_utf8_lossy(start).to_ascii_lowercase().contains("mime-version:")
}

/// `#cloud-configuration` is no `#cloud-config`; a script may have anything after `#!`.
fn begins(text: &str, header: &str) -> bool {
    text.strip_prefix(header).is_some_and(|rest| header == "#!" || rest.is_empty() || rest.starts_with(|c: char| c.is_ascii_whitespace()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case::cloud_config("#cloud-config\npackages: [x]\n")]
    #[case::only_the_header("#cloud-config")]
    #[case::crlf("#cloud-config\r\npackages: [x]\r\n")]
    #[case::archive("#cloud-config-archive\n- type: x\n")]
    #[case::script("#!/bin/sh\ntrue\n")]
    #[case::include("#include\nhttps://example.net/x\n")]
    #[case::include_once("#include-once\nhttps://example.net/x\n")]
    #[case::boothook("#cloud-boothook\n#!/bin/sh\n")]
    #[case::handler("#part-handler\n")]
    #[case::template("## template: jinja\n#cloud-config\nx: {{ v1.region }}\n")]
    fn what_cloud_init_knows_is_accepted(#[case] document: &str) {
        assert_eq!(check(document, GuestAgent::Install), Ok(()));
        assert_eq!(check(document, GuestAgent::Leave), Ok(()));
    }

    #[rstest]
    #[case::yaml_without_header("packages: [x]\n", Dropped::UnknownHeader)]
    #[case::blank_line_first("\n#cloud-config\n", Dropped::UnknownHeader)]
    #[case::space_in_front(" #cloud-config\n", Dropped::UnknownHeader)]
    #[case::space_inside("# cloud-config\n", Dropped::UnknownHeader)]
    #[case::longer_word("#cloud-configuration\n", Dropped::UnknownHeader)]
    #[case::upper_case("#CLOUD-CONFIG\n", Dropped::UnknownHeader)]
    #[case::byte_order_mark("\u{feff}#cloud-config\n", Dropped::UnknownHeader)]
    #[case::blank("  \n", Dropped::UnknownHeader)]
    #[case::template_of_nothing("## template: jinja\n", Dropped::TemplateOfNothing)]
    #[case::template_without_header("## template: jinja\npackages: [x]\n", Dropped::TemplateOfNothing)]
    fn what_cloud_init_drops_is_refused(#[case] document: &str, #[case] why: Dropped) {
        assert_eq!(check(document, GuestAgent::Install), Err(why));
        assert_eq!(check(document, GuestAgent::Leave), Err(why));
    }

    #[rstest]
    #[case::multipart("Content-Type: multipart/mixed; boundary=\"x\"\nMIME-Version: 1.0\n", Err(Dropped::NestedMime), Ok(()))]
    #[case::mime_first("MIME-Version: 1.0\nContent-Type: multipart/mixed\n", Err(Dropped::NestedMime), Ok(()))]
    #[case::mime_that_is_not_seen("Content-Type: text/plain\n\n", Err(Dropped::NestedMime), Err(Dropped::UnknownHeader))]
    #[case::taken_for_mime("#cloud-config\n# mime-version: none\n", Ok(()), Err(Dropped::TakenForMime))]
    fn mime_is_for_a_document_that_travels_alone(
        #[case] document: &str,
        #[case] beside_the_agent: Result<(), Dropped>,
        #[case] alone: Result<(), Dropped>,
    ) {
        assert_eq!(check(document, GuestAgent::Install), beside_the_agent);
        assert_eq!(check(document, GuestAgent::Leave), alone);
    }

    #[test]
    fn a_mime_version_behind_the_window_is_not_seen() {
        let document = format!("#cloud-config\n# {}\n# mime-version: none\n", "x".repeat(MIME_WINDOW));
        assert_eq!(check(&document, GuestAgent::Leave), Ok(()));
    }

    proptest! {
        #[test]
        fn no_document_panics(document in "(MIME-Version:|#cloud-config|## template: jinja|\n|\\PC){0,20}") {
            for agent in [GuestAgent::Install, GuestAgent::Leave] {
                let _ = check(&document, agent);
            }
        }
    }
}
