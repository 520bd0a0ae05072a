//! The script that gives a guest its QEMU guest agent, where it has none.
//!
//! libvirt learns a guest's address from the agent long before the host's ARP
//! table has it, if that ever does. The script runs once, as root, before the
//! user's own scripts, and therefore waits for nothing longer than it must.

/// POSIX sh; ASCII only, so that it can be a 7-bit MIME part.
pub const SCRIPT: &str = include_str!("guest-agent.sh");
/// Name of the script in the guest.
pub const FILE_NAME: &str = "kvm2-guest-agent.sh";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Output};

    use rstest::rstest;

    use super::*;

    /// A guest made of fake commands, and nothing else on its PATH. Each writes its name and
    /// arguments into a log; what else it does is its body.
    struct Guest {
        dir: tempfile::TempDir,
    }

    impl Guest {
        fn with(commands: &[(&str, &str)]) -> Self {
            let guest = Self { dir: tempfile::tempdir().expect("a temporary directory") };
            guest.put("sleep", "");
            commands.iter().for_each(|(name, body)| guest.put(name, body));
            guest
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn put(&self, name: &str, body: &str) {
            let path = self.path(name);
            let script = format!("#!/bin/sh\necho \"{name} $*\" >>\"$KVM2_TEST/log\"\n{body}\n");
            std::fs::write(&path, script).expect("written");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("made executable");
        }

        fn run(&self, shell: &Path) -> Output {
            let script = self.path("script");
            std::fs::write(&script, SCRIPT).expect("written");
            Command::new(shell)
                .arg(&script)
                .env_clear()
                .env("PATH", self.dir.path())
                .env("KVM2_TEST", self.dir.path())
                .output()
                .expect("a shell")
        }

        fn log(&self) -> Vec<String> {
            std::fs::read_to_string(self.path("log")).unwrap_or_default().lines().map(str::to_owned).collect()
        }
    }

    /// What a package manager does that works: the agent is there afterwards.
    const INSTALLS: &str =
        "printf '#!/bin/sh\\necho \"qemu-ga $*\" >>\"$KVM2_TEST/log\"\\n' >\"$KVM2_TEST/qemu-ga\" && /bin/chmod 755 \"$KVM2_TEST/qemu-ga\"";

    fn shell() -> &'static Path {
        // dash where it is: it has no extensions to lean on
        ["/usr/bin/dash", "/bin/sh"].map(Path::new).into_iter().find(|p| p.exists()).expect("a shell")
    }

    fn said(output: &Output) -> String {
        assert!(output.status.success(), "it must never fail: {output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[rstest]
    #[case("apt-get", "apt-get -q -y -o DPkg::Lock::Timeout=60 --no-install-recommends install qemu-guest-agent")]
    #[case("dnf", "dnf -y install qemu-guest-agent")]
    #[case("yum", "yum -y install qemu-guest-agent")]
    #[case("zypper", "zypper --non-interactive install qemu-guest-agent")]
    #[case("apk", "apk add --no-cache qemu-guest-agent")]
    fn a_missing_agent_is_installed_and_started(#[case] manager: &str, #[case] call: &str) {
        let guest = Guest::with(&[(manager, INSTALLS), ("systemctl", "")]);
        let text = said(&guest.run(shell()));
        assert!(text.contains("installed") && text.contains("running"), "{text}");
        let log = guest.log();
        assert!(log.iter().any(|line| line == call), "{log:?}");
        assert_eq!(log.last().map(String::as_str), Some("systemctl start qemu-guest-agent"));
    }

    #[test]
    fn an_agent_that_is_there_is_only_started() {
        let guest = Guest::with(&[("qemu-ga", ""), ("apt-get", INSTALLS), ("systemctl", "")]);
        assert!(said(&guest.run(shell())).contains("already installed"));
        assert_eq!(guest.log(), ["systemctl enable qemu-guest-agent", "systemctl start qemu-guest-agent"]);
    }

    #[test]
    fn openrc_starts_it_where_there_is_no_systemd() {
        let guest = Guest::with(&[("qemu-ga", ""), ("rc-update", ""), ("rc-service", "")]);
        assert!(said(&guest.run(shell())).contains("running"));
        assert_eq!(guest.log(), ["rc-update add qemu-guest-agent default", "rc-service qemu-guest-agent start"]);
    }

    #[test]
    fn without_any_service_manager_the_agent_itself_is_started() {
        let guest = Guest::with(&[("qemu-ga", "")]);
        assert!(said(&guest.run(shell())).contains("running"));
        assert_eq!(guest.log().len(), 1);
        assert!(guest.log()[0].starts_with("qemu-ga --daemonize"), "{:?}", guest.log());
    }

    #[test]
    fn a_service_manager_that_fails_is_not_the_end() {
        let guest = Guest::with(&[("qemu-ga", ""), ("systemctl", "exit 1"), ("pidof", "exit 1")]);
        assert!(said(&guest.run(shell())).contains("running"));
        assert!(guest.log().last().is_some_and(|line| line.starts_with("qemu-ga --daemonize")), "{:?}", guest.log());
    }

    #[test]
    fn a_running_agent_is_not_started_twice() {
        let guest = Guest::with(&[("qemu-ga", ""), ("pidof", "")]);
        assert!(said(&guest.run(shell())).contains("running"));
        assert_eq!(guest.log(), ["pidof qemu-ga"]);
    }

    #[test]
    fn a_held_package_lock_is_waited_for() {
        let busy_twice = format!(
            "echo x >>\"$KVM2_TEST/tries\"; n=0; while read -r _; do n=$((n+1)); done <\"$KVM2_TEST/tries\"; [ $n -ge 3 ] || exit 1; {INSTALLS}"
        );
        let guest = Guest::with(&[("dnf", &busy_twice), ("systemctl", "")]);
        assert!(said(&guest.run(shell())).contains("running"));
        assert_eq!(guest.log().iter().filter(|line| line.starts_with("sleep")).count(), 2);
    }

    #[test]
    fn a_package_that_is_nowhere_is_given_up_and_cloud_init_goes_on() {
        let guest = Guest::with(&[("dnf", "exit 1"), ("systemctl", "")]);
        assert!(said(&guest.run(shell())).contains("could not be installed"));
        let log = guest.log();
        assert_eq!(log.iter().filter(|line| line.starts_with("dnf")).count(), 6, "{log:?}");
        assert!(!log.iter().any(|line| line.starts_with("systemctl")), "{log:?}");
    }

    #[test]
    fn an_image_without_any_package_manager_ends_well_and_at_once() {
        let guest = Guest::with(&[]);
        assert!(said(&guest.run(shell())).contains("could not be installed"));
        assert!(guest.log().is_empty(), "nothing to wait for: {:?}", guest.log());
    }

    #[test]
    fn a_start_that_fails_everywhere_is_said_and_ends_well() {
        let guest = Guest::with(&[("qemu-ga", "exit 1"), ("systemctl", "exit 1")]);
        assert!(said(&guest.run(shell())).contains("could not be started"));
    }

    #[test]
    fn the_script_is_ascii_with_a_shebang() {
        assert!(SCRIPT.is_ascii() && SCRIPT.starts_with("#!/bin/sh\n") && SCRIPT.lines().all(|line| line.len() < 998));
    }
}
