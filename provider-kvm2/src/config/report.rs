//! All faults of a configuration in one report, each with file, line, path and value.

use std::fmt;
use std::path::PathBuf;

use super::ImageUrl;
use crate::error::bounded_to;

/// Longest value shown in a report, in bytes.
const MAX_SHOWN: usize = 120;
/// Longest problem that is printed, in bytes.
const MAX_PROBLEM: usize = 1024;

/// A configuration that was refused whole, and everything that is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigReport {
    file: PathBuf,
    faults: Vec<Fault>,
}

/// One thing that is wrong, and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub place: Place,
    pub path: Path,
    /// Fit for showing: bounded, without secrets; None where nothing was there.
    pub value: Option<String>,
    pub problem: String,
}

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    File { line: Option<u64> },
    Variable(String),
}

/// The keys from the root of the file to a value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path(Vec<String>);

impl ConfigReport {
    /// Sorted by place, so that a person can walk through the file once.
    pub fn new(file: impl Into<PathBuf>, mut faults: Vec<Fault>) -> Self {
        faults.sort_by(|a, b| (&a.place, &a.path).cmp(&(&b.place, &b.path)));
        Self { file: file.into(), faults }
    }

    /// Never empty.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    pub fn file(&self) -> &std::path::Path {
        &self.file
    }
}

impl fmt::Display for ConfigReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        let count = self.faults.len();
        write!(f, "{file} is refused: {count} {}", if count == 1 { "fault" } else { "faults" })?;
        for fault in &self.faults {
            match &fault.place {
                Place::File { line: Some(line) } => write!(f, "\n  {file}:{line}: ")?,
                Place::File { line: None } => write!(f, "\n  {file}: ")?,
                Place::Variable(name) => write!(f, "\n  environment variable {}: ", bounded_to(name, MAX_SHOWN))?,
            }
            if !fault.path.is_root() {
                write!(f, "{}: ", fault.path)?;
            }
            // it may quote a part of a variable's name or of the file
            f.write_str(&bounded_to(&fault.problem, MAX_PROBLEM))?;
            if let Some(value) = &fault.value {
                write!(f, " (found {value})")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for ConfigReport {}

impl Path {
    pub fn root() -> Self {
        Self(Vec::new())
    }

    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    #[must_use]
    pub fn join(&self, step: &str) -> Self {
        let mut steps = self.0.clone();
        steps.push(step.to_owned());
        Self(steps)
    }

    pub fn parent(&self) -> Option<Self> {
        let (_, steps) = self.0.split_last()?;
        Some(Self(steps.to_vec()))
    }

    pub fn last(&self) -> &str {
        self.0.last().map_or("", String::as_str)
    }

    /// The last key that is no list index.
    fn key(&self) -> &str {
        self.0.iter().rev().find(|s| super::raw::parse_index(s).is_none()).map_or("", String::as_str)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, step) in self.0.iter().enumerate() {
            if let Some(i) = super::raw::parse_index(step) {
                write!(f, "[{i}]")?;
                continue;
            }
            if n > 0 {
                f.write_str(".")?;
            }
            // a slip of syntax can make a key of a value, and so of a secret
            let value_like = step.contains([':', '/', '@', '?', '=', '\'', '"', '\n']);
            f.write_str(&if value_like { "…".to_owned() } else { bounded_to(step, MAX_SHOWN) })?;
        }
        Ok(())
    }
}

/// A scalar made fit for a report: what may be secret at this path is left out.
pub fn shown(path: &Path, text: &str) -> String {
    match path.key() {
        "vendorData" => format!("{} bytes of text", text.len()),
        "url" => format!("\"{}\"", bounded_to(&shown_url(text), MAX_SHOWN)),
        // a key pasted where the name of its file belongs
        _ if text.contains("PRIVATE KEY") || text.contains('\n') => "text that is not shown".to_owned(),
        // a URL, or a part of one, where none belongs
        _ if text.contains(['@', '?', '#']) => format!("\"{}\"", bounded_to(&shown_url(text), MAX_SHOWN)),
        _ => format!("\"{}\"", bounded_to(text, MAX_SHOWN)),
    }
}

/// A URL without user-info, query and fragment; of what was meant as one, only parts that can be neither.
fn shown_url(text: &str) -> String {
    if let Some(url) = ImageUrl::parse(text) {
        return url.redacted();
    }
    let plain = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b'/'));
    match text.split_once("://") {
        Some((scheme, rest)) if plain(scheme) && plain(rest) => text.to_owned(),
        Some((scheme, _)) if plain(scheme) => format!("{scheme}://…"),
        None if plain(text) => text.to_owned(),
        _ => "…".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Path {
        text.split('.').fold(Path::root(), |p, s| p.join(s))
    }

    #[test]
    fn the_report_names_file_line_path_and_value_in_file_order() {
        let at = |line, key: &str| Fault {
            place: Place::File { line: Some(line) },
            path: path(key),
            value: Some(shown(&path(key), "x")),
            problem: "wrong".into(),
        };
        let variable =
            Fault { place: Place::Variable("KVM2_PROVIDERS__A__B".into()), path: path("b"), value: None, problem: "unknown".into() };
        let report = ConfigReport::new("p.yaml", vec![variable, at(9, "z"), at(2, "y.[000003].q")]);
        assert_eq!(
            report.to_string(),
            "p.yaml is refused: 3 faults\n  p.yaml:2: y[3].q: wrong (found \"x\")\n  p.yaml:9: z: wrong (found \"x\")\n  \
             environment variable KVM2_PROVIDERS__A__B: b: unknown"
        );
    }

    #[test]
    fn secrets_are_not_shown() {
        for (key, text) in [
            ("images.a.url", "https://user:SENTINEL@host/x?token=SENTINEL#SENTINEL"),
            ("images.a.url", "ftp://user:SENTINEL@host/x?token=SENTINEL"),
            ("images.a.url", "user:SENTINEL@host"),
            ("vendorData", "password: SENTINEL"),
            ("hosts.address", "root:SENTINEL@hv1"),
            ("urlPolicy.allow", "https://user:SENTINEL@host/?SENTINEL"),
            ("sshKeyFile", "-----BEGIN OPENSSH PRIVATE KEY-----SENTINEL"),
            ("sshKeyFile", "a\nSENTINEL"),
            ("sshKeyFile", "host/x#SENTINEL"),
        ] {
            let out = shown(&path(key), text);
            assert!(!out.contains("SENTINEL"), "{key}: {out}");
        }
    }

    #[test]
    fn a_hostile_value_is_bounded_and_escaped() {
        let out = shown(&path("user"), &format!("\x1b[2J{}", "x".repeat(1000)));
        assert!(out.len() < 150 && !out.contains('\x1b'), "{out}");
    }
}
