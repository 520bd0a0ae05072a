//! Whether cloud-init would use a configured vendor document at all.
//!
//! cloud-init tells documents apart by how they begin and drops, with one line in
//! the guest's log, what it does not know. So that is found here, at load.

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

/// Why cloud-init would drop a vendor document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Dropped {
    #[error("cloud-init drops a document that does not begin with one of: {}; put the header in the very first line", KNOWN.join(", "))]
    UnknownHeader,
    #[error(
        "a MIME document is dropped, because it becomes one part of a multipart and cloud-init does not look into nested ones; \
         configure one #cloud-config, script or #include instead"
    )]
    NestedMime,
    #[error("a jinja template needs a second line with the header of what it makes, such as #cloud-config")]
    TemplateOfNothing,
}

/// `Ok` where cloud-init would use the document.
pub fn check(document: &str) -> Result<(), Dropped> {
    let first = document.lines().next().unwrap_or_default();
    let lower = document.trim_start().to_ascii_lowercase();
    if lower.starts_with("mime-version:") || lower.starts_with("content-type:") || lower.starts_with("from ") {
        return Err(Dropped::NestedMime);
    }
    if let Some(rest) = document.strip_prefix("## template: jinja") {
        // a template is rendered first; its result is looked at again
        let inner = rest.split_once('\n').map_or("", |(_, inner)| inner);
        let known = KNOWN.iter().any(|header| begins(inner, header)) && !inner.starts_with("## template");
        return if known { Ok(()) } else { Err(Dropped::TemplateOfNothing) };
    }
    if KNOWN.iter().any(|header| begins(first, header)) { Ok(()) } else { Err(Dropped::UnknownHeader) }
}

/// `#cloud-configuration` is no `#cloud-config`; a script may have anything after `#!`.
fn begins(text: &str, header: &str) -> bool {
    text.strip_prefix(header).is_some_and(|rest| header == "#!" || rest.is_empty() || rest.starts_with(|c: char| c.is_ascii_whitespace()))
}

#[cfg(test)]
mod tests {
    use super::*;
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
        assert_eq!(check(document), Ok(()));
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
    #[case::multipart("Content-Type: multipart/mixed; boundary=\"x\"\nMIME-Version: 1.0\n", Dropped::NestedMime)]
    #[case::mime_first("MIME-Version: 1.0\nContent-Type: multipart/mixed\n", Dropped::NestedMime)]
    #[case::template_of_nothing("## template: jinja\n", Dropped::TemplateOfNothing)]
    #[case::template_without_header("## template: jinja\npackages: [x]\n", Dropped::TemplateOfNothing)]
    fn what_cloud_init_drops_is_refused(#[case] document: &str, #[case] why: Dropped) {
        assert_eq!(check(document), Err(why));
    }
}
