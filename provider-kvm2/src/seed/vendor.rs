//! `vendor-data`: what we and the configuration add to a guest beside user-data.
//!
//! The guest agent comes as a script and not as a cloud-config, because cloud-init
//! lets a user-data key replace the same vendor-data key: a user's `packages:`
//! would silently take the agent away. A configured document travels beside it as
//! another part of a MIME multipart.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

use super::agent;
use crate::config::GuestAgent;

/// Longest configured document, in bytes.
pub const MAX_VENDOR_DATA: usize = 512 << 10;

/// How far cloud-init looks for `MIME-Version:` to decide that a document is MIME.
const MIME_WINDOW: usize = 4096;
/// Line length of base64 in MIME.
const LINE: usize = 76;

/// First lines by which cloud-init knows a document. It compares the start only, without case.
const HEADERS: [&str; 9] = [
    "#cloud-config",
    "#cloud-config-archive",
    "#cloud-config-jsonp",
    "#cloud-boothook",
    "#part-handler",
    "#include",
    "#include-once",
    "#!",
    "## template: jinja",
];

/// Why a configured document would not arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VendorFault {
    #[error("it is longer than {MAX_VENDOR_DATA} bytes")]
    TooLong,
    #[error("its first line is none that cloud-init knows; begin it with #cloud-config, #! or another header, or it is dropped in silence")]
    UnknownHeader,
    #[error(
        "it is MIME itself, which cloud-init drops inside the multipart that carries the guest agent; give one document, or set installGuestAgent: false"
    )]
    Multipart,
    #[error("it has a line 'MIME-Version:' near its start, by which cloud-init takes it for MIME; remove the line")]
    LooksLikeMime,
}

/// Whether cloud-init would use a configured document. For the load of the configuration.
pub fn check(configured: &str, agent: GuestAgent) -> Result<(), VendorFault> {
    if configured.len() > MAX_VENDOR_DATA {
        return Err(VendorFault::TooLong);
    }
    // cloud-init skips white space before the header
    let lower = configured.trim_start().to_ascii_lowercase();
    if lower.is_empty() {
        return Ok(());
    }
    let is_mime = lower.starts_with("mime-version:") || lower.starts_with("content-type:") || lower.starts_with("from nobody ");
    match (is_mime, agent) {
        (true, GuestAgent::Install) => return Err(VendorFault::Multipart),
        (true, GuestAgent::Leave) if mime_in_window(configured) => return Ok(()),
        (true, GuestAgent::Leave) => return Err(VendorFault::UnknownHeader),
        (false, _) => {}
    }
    if !HEADERS.iter().any(|header| lower.starts_with(header)) {
        return Err(VendorFault::UnknownHeader);
    }
    // beside the agent it is base64 and cannot be mistaken
    if agent == GuestAgent::Leave && mime_in_window(configured) {
        return Err(VendorFault::LooksLikeMime);
    }
    Ok(())
}

/// The file: empty, one document, or a multipart of both. The same input gives the same bytes.
pub fn vendor_data(configured: Option<&str>, agent: GuestAgent) -> Vec<u8> {
    let configured = configured.filter(|document| !document.trim().is_empty());
    match (configured, agent) {
        (None, GuestAgent::Leave) => Vec::new(),
        (None, GuestAgent::Install) => agent::SCRIPT.into(),
        (Some(document), GuestAgent::Leave) => document.into(),
        (Some(document), GuestAgent::Install) => multipart(document).into_bytes(),
    }
}

fn multipart(document: &str) -> String {
    // the document's type is found from its first line: text/plain means "look". As base64, since
    // cloud-init decodes an 8-bit part through a codec that breaks every character beyond Latin-1.
    let document = base64_lines(document.as_bytes());
    let boundary = boundary(&[&document, agent::SCRIPT]);
    let mut out = String::new();
    // MIME-Version first: cloud-init decides by it. Writing to a String cannot fail.
    let _ = write!(
        out,
        "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"{boundary}\"\n\n\
         --{boundary}\nContent-Type: text/plain; charset=\"utf-8\"\nContent-Transfer-Encoding: base64\n\
         Content-Disposition: attachment; filename=\"vendor-data\"\n\n{document}\n\
         --{boundary}\nContent-Type: text/x-shellscript; charset=\"us-ascii\"\nContent-Transfer-Encoding: 7bit\n\
         Content-Disposition: attachment; filename=\"{}\"\n\n{}\n\
         --{boundary}--\n",
        agent::FILE_NAME,
        agent::SCRIPT,
    );
    out
}

/// A boundary that no part contains.
fn boundary(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part.as_bytes()));
    let mut boundary = format!("kvm2-{}", hex::encode(hash.finalize()));
    while parts.iter().any(|part| part.contains(&boundary)) {
        boundary = format!("kvm2-{}", hex::encode(Sha256::digest(boundary.as_bytes())));
    }
    boundary
}

fn base64_lines(bytes: &[u8]) -> String {
    let encoded = STANDARD.encode(bytes);
    let mut rest = encoded.as_str();
    let mut out = String::with_capacity(encoded.len() + encoded.len() / LINE + 1);
    while let Some((line, tail)) = rest.split_at_checked(LINE) {
        out.push_str(line);
        out.push('\n');
        rest = tail;
    }
    out.push_str(rest);
    out
}

fn mime_in_window(document: &str) -> bool {
    let start = &document.as_bytes()[..document.len().min(MIME_WINDOW)];
    String::from_utf8_lossy(start).to_ascii_lowercase().contains("mime-version:")
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    const CONFIG: &str = "#cloud-config\n# příliš žluťoučký kůň\r\nFrom me\n--kvm2\nmime-version: x\npackages: [squid]";

    #[rstest]
    #[case::nothing(None, GuestAgent::Leave, "")]
    #[case::blank(Some(" \n"), GuestAgent::Leave, "")]
    #[case::document_only(Some(CONFIG), GuestAgent::Leave, CONFIG)]
    #[case::script_only(None, GuestAgent::Install, agent::SCRIPT)]
    #[case::script_only_beside_blank(Some("\n"), GuestAgent::Install, agent::SCRIPT)]
    fn one_part_travels_as_it_is(#[case] configured: Option<&str>, #[case] agent: GuestAgent, #[case] expected: &str) {
        assert_eq!(vendor_data(configured, agent), expected.as_bytes());
    }

    #[test]
    fn two_parts_begin_with_the_mime_version() {
        let data = vendor_data(Some(CONFIG), GuestAgent::Install);
        assert!(data.starts_with(b"MIME-Version: 1.0\nContent-Type: multipart/mixed;"));
        assert_eq!(data, vendor_data(Some(CONFIG), GuestAgent::Install), "the same input, the same bytes");
    }

    /// Read by the library that cloud-init reads it with, in the way that it does.
    #[test]
    fn pythons_mail_parser_finds_both_documents_unchanged() {
        const READ: &str = "import email,sys,base64\n\
            m=email.message_from_string(sys.stdin.buffer.read().decode('utf-8'))\n\
            for p in m.walk():\n\
            \x20 if not p.is_multipart(): print(p.get_content_type(), base64.b64encode(p.get_payload(decode=True)).decode())\n";
        let child = Command::new("python3").args(["-c", READ]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let Ok(mut child) = child else {
            eprintln!("skipped: python3 is not installed");
            return;
        };
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(&vendor_data(Some(CONFIG), GuestAgent::Install)).expect("read by the child");
        drop(stdin);
        let output = child.wait_with_output().expect("it ends");
        let expected = format!("text/plain {}\ntext/x-shellscript {}\n", STANDARD.encode(CONFIG), STANDARD.encode(agent::SCRIPT));
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    }

    #[rstest]
    #[case("#cloud-config\nx: 1\n")]
    #[case("\n\n  #Cloud-Config\n")]
    #[case("#!/bin/sh\n")]
    #[case("#include https://example.org/x\n")]
    #[case("## template: jinja\n#cloud-config\n")]
    #[case("")]
    fn a_document_with_a_known_header_passes(#[case] document: &str) {
        assert_eq!(check(document, GuestAgent::Install), Ok(()));
        assert_eq!(check(document, GuestAgent::Leave), Ok(()));
    }

    #[rstest]
    #[case::yaml_without_header("packages: [a]\n", GuestAgent::Install, VendorFault::UnknownHeader)]
    #[case::comment_first("# mine\n#cloud-config\n", GuestAgent::Leave, VendorFault::UnknownHeader)]
    #[case::mime_in_mime("MIME-Version: 1.0\nContent-Type: multipart/mixed\n", GuestAgent::Install, VendorFault::Multipart)]
    #[case::mime_by_type("Content-Type: multipart/mixed\nMIME-Version: 1.0\n", GuestAgent::Install, VendorFault::Multipart)]
    #[case::mime_that_is_not_seen("Content-Type: text/plain\n\n", GuestAgent::Leave, VendorFault::UnknownHeader)]
    #[case::taken_for_mime("#cloud-config\n# mime-version: none\n", GuestAgent::Leave, VendorFault::LooksLikeMime)]
    fn a_document_that_would_be_dropped_is_refused(#[case] document: &str, #[case] agent: GuestAgent, #[case] fault: VendorFault) {
        assert_eq!(check(document, agent), Err(fault));
    }

    #[test]
    fn mime_alone_passes_and_length_is_bounded() {
        assert_eq!(check("MIME-Version: 1.0\nContent-Type: multipart/mixed\n", GuestAgent::Leave), Ok(()));
        assert_eq!(check(&"#".repeat(MAX_VENDOR_DATA + 1), GuestAgent::Leave), Err(VendorFault::TooLong));
    }

    proptest! {
        #[test]
        fn any_document_decodes_to_itself(document in "\\PC{0,400}") {
            let text = base64_lines(document.as_bytes());
            prop_assert!(text.lines().all(|line| line.len() <= LINE));
            let joined: String = text.lines().collect();
            prop_assert_eq!(STANDARD.decode(joined).ok(), Some(document.into_bytes()));
        }

        #[test]
        fn check_never_panics(document in "(MIME-Version:|#|!|\\PC){0,20}") {
            let _ = check(&document, GuestAgent::Install);
            let _ = check(&document, GuestAgent::Leave);
        }
    }
}
