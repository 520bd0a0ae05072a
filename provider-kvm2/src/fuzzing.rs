//! What a fuzzer feeds: each target gives bytes to the parser that meets them in
//! the daemon and asserts what that parser promises, not only that it returns.
//!
//! Only in tests and in a build with the feature `fuzzing`. The inputs that are
//! kept lie in `tests/fuzz/corpus/<target>/`; `tests/fuzz/run` looks for more.

mod documents;
mod files;
mod reach;
mod texts;

#[cfg(test)]
mod mutate;
#[cfg(test)]
mod replay;

/// One parser and its promises. `run` panics when one is broken.
#[derive(Debug)]
pub struct Target {
    /// Name of its directory in the corpus.
    pub name: &'static str,
    pub run: fn(&[u8]),
}

/// All targets but the peer on libvirt's socket, which is a test of its own (`fuzz_libvirt_peer`).
pub const TARGETS: [Target; 12] = [
    Target { name: "agent_reply", run: texts::agent_reply },
    Target { name: "capabilities_xml", run: documents::capabilities_xml },
    Target { name: "config", run: files::config },
    Target { name: "domain_xml", run: documents::domain_xml },
    Target { name: "instance_id", run: texts::instance_id },
    Target { name: "known_hosts", run: files::known_hosts },
    Target { name: "mark", run: documents::mark },
    Target { name: "origin", run: files::origin },
    Target { name: "pool_xml", run: documents::pool_xml },
    Target { name: "qcow2", run: files::qcow2 },
    Target { name: "url_policy", run: reach::url_policy },
    Target { name: "volume_xml", run: documents::volume_xml },
];

/// The target of this name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// What is kept of a host's document is no longer than the document and holds only what XML can hold.
fn assert_kept<'a>(texts: impl IntoIterator<Item = &'a str>, document: &str) {
    let mut length = 0;
    for text in texts {
        length += text.len();
        let foreign = text.chars().find(|c| c.is_ascii_control() && !matches!(c, '\t' | '\n' | '\r' | '\x7f'));
        assert_eq!(foreign, None, "a control character was kept: {text:?}");
    }
    assert!(length <= document.len(), "{length} bytes are kept of a document of {}", document.len());
}
