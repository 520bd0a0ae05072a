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

/// Line length of base64 in MIME.
const LINE: usize = 76;

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

    proptest! {
        #[test]
        fn any_document_decodes_to_itself(document in "\\PC{0,400}") {
            let text = base64_lines(document.as_bytes());
            prop_assert!(text.lines().all(|line| line.len() <= LINE));
            let joined: String = text.lines().collect();
            prop_assert_eq!(STANDARD.decode(joined).ok(), Some(document.into_bytes()));
        }
    }
}
