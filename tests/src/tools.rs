//! Programs that the tests use beside the daemon.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// grpcurl from PATH or from where `tests/tools/install` puts it; None with a line that says SKIP.
pub fn grpcurl(test: &str) -> Option<PathBuf> {
    let on_path =
        std::env::var_os("PATH").and_then(|path| std::env::split_paths(&path).map(|dir| dir.join("grpcurl")).find(|p| p.is_file()));
    let found = on_path.or_else(|| {
        let install = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/install");
        let said = Command::new(install).arg("--print-bin").stdin(Stdio::null()).output().ok()?;
        let path = Path::new(String::from_utf8(said.stdout).ok()?.trim()).join("grpcurl");
        path.is_file().then_some(path)
    });
    if found.is_none() {
        // not through print!, which the test runner keeps to itself when a test passes
        let _ = writeln!(std::io::stderr(), "SKIP {test}: no grpcurl; tests/tools/install fetches it");
    }
    found
}

/// What grpcurl printed.
#[derive(Debug)]
pub struct Said {
    pub success: bool,
    pub stdout: String,
    pub stderr: String,
}

/// Calls grpcurl on a unix socket: flags, then what is to be called or described.
pub fn call_grpcurl(program: &Path, socket: &Path, flags: &[&str], target: &[&str]) -> Said {
    let mut command = Command::new(program);
    // without the flag it sends the path as authority, which HTTP/2 servers refuse
    command
        .args(["-plaintext", "-unix", "-authority", "localhost", "-max-time", "30"])
        .args(flags)
        .arg(socket)
        .args(target)
        .stdin(Stdio::null());
    let Output { status, stdout, stderr } = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    Said {
        success: status.success(),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// A new private key of OpenSSH.
pub fn ssh_key(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    let status = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&path).stdin(Stdio::null()).status();
    assert!(status.is_ok_and(|s| s.success()), "ssh-keygen failed; install openssh-client");
    path
}
