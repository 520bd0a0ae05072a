//! The daemon built with its failpoints, and the names that they have.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::daemon;

/// Path of the program with failpoints; else `kvm2-providerd-failpoints` beside the ordinary one.
const BINARY: &str = "KVM2_PROVIDERD_FAILPOINTS";
/// Set by `tests/run`: a test without the program fails instead of being skipped.
const REQUIRED: &str = "KVM2_LAB_REQUIRED";

/// The program with failpoints; None with a line that says SKIP.
pub fn binary(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os(BINARY).map_or_else(|| daemon::binary().with_file_name("kvm2-providerd-failpoints"), PathBuf::from);
    if path.is_file() {
        return Some(path);
    }
    let help = format!("{} is not there: tests/matrix --build makes it", path.display());
    assert!(std::env::var_os(REQUIRED).is_none(), "{test}: {help}");
    // not through print!, which the test runner keeps to itself when a test passes
    let _ = writeln!(std::io::stderr(), "SKIP {test}: {help}");
    None
}

/// Names of all failpoints of an operation, as the daemon's sources have them, in their order there.
pub fn of(operation: &str) -> Vec<String> {
    let mut names = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../provider-kvm2/src"), &format!("failpoint!(\"{operation}."), &mut names);
    assert!(!names.is_empty(), "no failpoint of {operation} in the sources");
    names
}

fn collect(dir: &Path, opening: &str, names: &mut Vec<String>) {
    let mut entries: Vec<_> = fs::read_dir(dir).expect("reading the sources").map(|e| e.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            collect(&path, opening, names);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(&path).expect("a source");
            for (at, _) in text.match_indices(opening) {
                let name = text[at..].split('"').nth(1).expect("the name is quoted");
                assert!(!names.iter().any(|n| n == name), "failpoint {name} is in two places");
                names.push(name.to_owned());
            }
        }
    }
}

/// All failpoints of one daemon, armed one at a time while it runs: what a place is told counts once.
#[derive(Debug)]
pub struct Places {
    dir: PathBuf,
}

impl Places {
    pub fn new(dir: &Path) -> Self {
        let dir = dir.join("places");
        fs::create_dir_all(&dir).expect("a directory in a temporary one");
        Self { dir }
    }

    /// What `FAILPOINTS` says for the daemon to look here.
    pub fn all(&self) -> String {
        let names = ["create", "delete", "publish"].into_iter().flat_map(of);
        names.map(|name| format!("{name}=return(from:{})", self.dir.display())).collect::<Vec<_>>().join(";")
    }

    /// The next time that the daemon comes to `name` it does this.
    pub fn arm(&self, name: &str, action: &str) {
        let new = self.dir.join("new");
        fs::write(&new, action).expect("a file in a temporary directory");
        fs::rename(&new, self.dir.join(name)).expect("moving it into place");
    }

    /// Whether the daemon has not yet come to `name` since it was armed.
    pub fn is_armed(&self, name: &str) -> bool {
        self.dir.join(name).exists()
    }

    /// As if it had not been armed; true if the daemon never came there.
    pub fn disarm(&self, name: &str) -> bool {
        fs::remove_file(self.dir.join(name)).is_ok()
    }
}

/// A file that holds the daemon at a failpoint until it is let go, by hand or by a test that ends.
#[derive(Debug)]
pub struct Hold {
    path: PathBuf,
}

impl Hold {
    pub fn new(dir: &Path, name: &str) -> Self {
        let path = dir.join(format!("hold-{name}"));
        fs::write(&path, b"").expect("a file in a temporary directory");
        Self { path }
    }

    /// The action of a failpoint.
    pub fn action(&self) -> String {
        format!("hold:{}", self.path.display())
    }

    /// What `FAILPOINTS` says to hold at `name`.
    pub fn at(&self, name: &str) -> String {
        format!("{name}=return({})", self.action())
    }

    /// The same, for those that come after the first `n`.
    pub fn after(&self, n: usize, name: &str) -> String {
        format!("{name}={n}*off->return({})", self.action())
    }

    pub fn let_go(&self) {
        // gone already when let go twice
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.let_go();
    }
}
