//! `virsh` over SSH, as a user would run it: OpenSSH with its defaults, a new connection for
//! each command.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::lab::{Host, Lab};

#[derive(Debug, Clone)]
pub struct Rival {
    uri: String,
}

impl Rival {
    /// Connects to the host, or to the address of a proxy in front of it.
    pub fn to(lab: &Lab, host: &Host, via: Option<SocketAddr>, dir: &Path) -> Self {
        // libvirt's ssh transport takes no known_hosts file, so ssh is told by a wrapper; the host's keys are
        // those of its own address, whichever way leads there
        let wrapper = dir.join("ssh");
        let text = format!(
            "#!/bin/sh\nexec ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile={} -o 'HostKeyAlias=[{}]:{}' \"$@\"\n",
            lab.known_hosts.display(),
            host.address,
            host.port
        );
        std::fs::write(&wrapper, text).expect("writing a script");
        std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755)).expect("making a script executable");
        let address = via.map_or_else(|| format!("{}:{}", host.address, host.port), |via| via.to_string());
        // libvirt's ssh transport runs virt-ssh-helper on the host: it needs the account with a shell. Naming a socket
        // would make it run netcat instead
        let uri =
            format!("qemu+ssh://{}@{address}/system?keyfile={}&command={}", host.exec_user, lab.id_ed25519.display(), wrapper.display());
        Self { uri }
    }

    /// One command over a connection of its own; its standard output.
    pub fn run(&self, args: &[&str]) -> String {
        said(self.command().args(args).stdin(Stdio::null()).output())
    }

    /// Many commands, one a line, over one connection.
    pub fn session(&self, lines: &str) -> String {
        session(self.command(), lines)
    }

    /// As [`Rival::session`], where commands may fail.
    pub fn lenient_session(&self, lines: &str) {
        let output = output_of(self.command(), lines).unwrap_or_else(|e| panic!("virsh: {e}"));
        assert!(!String::from_utf8_lossy(&output.stderr).contains("failed to connect"), "virsh cannot connect");
    }

    fn command(&self) -> Command {
        let mut command = Command::new("virsh");
        command.args(["-q", "-c", &self.uri]).env("LC_ALL", "C");
        command
    }
}

/// Many commands, one a line, on the host's local socket: to prepare, not to be measured.
pub fn local_session(host: &Host, lines: &str) -> String {
    let mut command = Command::new("virsh");
    command.args(["-q", "-c", &host.uri]).env("LC_ALL", "C");
    session(command, lines)
}

fn session(command: Command, lines: &str) -> String {
    said(output_of(command, lines))
}

fn output_of(mut command: Command, lines: &str) -> std::io::Result<Output> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().expect("stdin is a pipe");
    let lines = lines.to_owned();
    // beside the reading: a thousand answers do not fit into a pipe
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let output = child.wait_with_output();
    writer.join().expect("a thread that only writes")?;
    output
}

/// virsh goes on after a command that fails and may still say that all is well, so its errors are read.
fn said(output: std::io::Result<Output>) -> String {
    let Output { status, stdout, stderr } = output.unwrap_or_else(|e| panic!("virsh: {e}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8_lossy(&stderr));
    assert!(status.success() && !stderr.contains("error:"), "virsh: {status}: {stderr}");
    stdout
}
