//! Keeps the configuration current: the file is looked at every
//! [`WATCH_INTERVAL`], one `stat` each time.
//!
//! A changed file is read once it has looked the same twice in a row, so a writer
//! in the middle of it is not taken for a shorter configuration. A broken file is
//! refused whole, said once, and the old configuration stays. Replaced symbolic
//! links, which is how a Kubernetes ConfigMap changes, are changes.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::{Config, ConfigHandle, ConfigReport, Entry, WATCH_INTERVAL, load};

/// Looks at one file; [`Watcher::poll_once`] is one look.
#[derive(Debug)]
pub struct Watcher {
    path: PathBuf,
    env: Vec<(String, String)>,
    /// How the file looked when it was last read.
    read: Option<Stamp>,
    /// How it looked a moment ago.
    last: Option<Stamp>,
    sender: watch::Sender<Arc<Config>>,
}

/// What a look found.
#[derive(Debug)]
pub enum Look {
    Unchanged,
    /// The file changed; it is read once it stays the same.
    Settling,
    /// It was read and says the same as before.
    Same,
    /// The configuration was replaced; what changed, by name.
    Replaced(Vec<String>),
    /// The new file is broken; the old configuration stays.
    Refused(ConfigReport),
}

/// Two stamps differ if the file was written, replaced or became unreadable in between.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stamp {
    File { device: u64, inode: u64, length: u64, modified: (i64, i64), changed: (i64, i64) },
    Unreadable(io::ErrorKind),
}

/// The handle, and the task that keeps it current until `stop`.
pub fn watch(
    path: PathBuf,
    env: impl IntoIterator<Item = (String, String)>,
    initial: Config,
    stop: CancellationToken,
) -> (ConfigHandle, impl Future<Output = ()> + Send + 'static) {
    let (watcher, handle) = Watcher::new(path, env, initial);
    (handle, run(watcher, stop))
}

async fn run(mut watcher: Watcher, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(WATCH_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        // the file may lie on a mount that hangs, which must not hold up anything else
        let look = tokio::task::spawn_blocking(move || {
            let look = watcher.poll_once();
            (watcher, look)
        });
        let (returned, look) = tokio::select! {
            () = stop.cancelled() => return,
            done = look => match done {
                Ok(done) => done,
                Err(e) => {
                    tracing::error!(error = %e, "the configuration is no longer watched; restart the daemon");
                    return;
                }
            }
        };
        watcher = returned;
        watcher.say(&look);
    }
}

impl Watcher {
    /// `initial` is what the file said when the daemon started; the first look compares.
    pub fn new(path: PathBuf, env: impl IntoIterator<Item = (String, String)>, initial: Config) -> (Self, ConfigHandle) {
        let (sender, receiver) = watch::channel(Arc::new(initial));
        let env = env.into_iter().collect();
        (Self { path, env, read: None, last: None, sender }, ConfigHandle::new(receiver))
    }

    pub fn poll_once(&mut self) -> Look {
        let stamp = Stamp::of(&self.path);
        if self.read.as_ref() == Some(&stamp) {
            self.last = Some(stamp);
            return Look::Unchanged;
        }
        if self.last.as_ref() != Some(&stamp) {
            self.last = Some(stamp);
            return Look::Settling;
        }
        let loaded = load(&self.path, self.env.iter().cloned());
        // written while it was read: nobody knows which half was seen
        if Stamp::of(&self.path) != stamp {
            return Look::Settling;
        }
        self.read = Some(stamp);
        match loaded {
            Err(report) => Look::Refused(report),
            Ok((config, _)) => {
                let changes = changes(&self.sender.borrow(), &config);
                if changes.is_empty() {
                    return Look::Same;
                }
                self.sender.send_replace(Arc::new(config));
                Look::Replaced(changes)
            }
        }
    }

    fn say(&self, look: &Look) {
        let file = self.path.display();
        match look {
            Look::Unchanged | Look::Settling | Look::Same => {}
            Look::Replaced(changes) => {
                tracing::info!(%file, changes = changes.join("; "), "configuration replaced");
                for entry in &self.sender.borrow().entries {
                    for warning in &entry.warnings {
                        tracing::warn!(entry = entry.name, "{warning}");
                    }
                }
            }
            Look::Refused(report) => tracing::warn!(%file, %report, "the changed configuration is refused, the old one stays"),
        }
    }
}

impl Stamp {
    fn of(path: &std::path::Path) -> Self {
        match std::fs::metadata(path) {
            Ok(m) => Self::File {
                device: m.dev(),
                inode: m.ino(),
                length: m.len(),
                modified: (m.mtime(), m.mtime_nsec()),
                changed: (m.ctime(), m.ctime_nsec()),
            },
            Err(e) => Self::Unreadable(e.kind()),
        }
    }
}

/// What differs, by name only; empty if nothing does.
fn changes(old: &Config, new: &Config) -> Vec<String> {
    let mut out = Vec::new();
    named("entry", &old.entries, &new.entries, |e| (&e.name, &**e), &mut out);
    // what changed inside of an entry says more than that it changed
    out.retain(|line| !line.ends_with(" changed"));
    for after in &new.entries {
        if let Some(before) = old.entries.iter().find(|e| e.name == after.name) {
            let mut inside = Vec::new();
            entry_changes(before, after, &mut inside);
            out.extend(inside.into_iter().map(|line| format!("entry {}: {line}", after.name)));
        }
    }
    if out.is_empty() && old != new {
        out.push("the order of the entries changed".to_owned());
    }
    out
}

fn entry_changes(old: &Entry, new: &Entry, out: &mut Vec<String>) {
    named("host", &old.hosts, &new.hosts, |h| (&h.name, h), out);
    named("image", &old.images, &new.images, |(k, v)| (k, v), out);
    named("machine type", &old.machine_types, &new.machine_types, |(k, v)| (k, v), out);
    let rest = |e: &Entry| Entry { images: Default::default(), machine_types: Default::default(), hosts: Vec::new(), ..e.clone() };
    if rest(old) != rest(new) {
        out.push("settings changed".to_owned());
    }
    if out.is_empty() && old != new {
        out.push("the order of the hosts changed".to_owned());
    }
}

fn named<'a, C, I, T>(what: &str, old: &'a C, new: &'a C, split: impl Fn(I) -> (&'a String, T), out: &mut Vec<String>)
where
    &'a C: IntoIterator<Item = I>,
    T: PartialEq + Debug,
{
    let old: Vec<_> = old.into_iter().map(&split).collect();
    let new: Vec<_> = new.into_iter().map(&split).collect();
    let names: BTreeSet<&String> = old.iter().chain(&new).map(|(n, _)| *n).collect();
    for name in names {
        let find = |items: &'_ [(&String, T)]| items.iter().position(|(n, _)| *n == name);
        match (find(&old), find(&new)) {
            (Some(a), Some(b)) if old[a].1 == new[b].1 => {}
            (Some(_), Some(_)) => out.push(format!("{what} {name} changed")),
            (Some(_), None) => out.push(format!("{what} {name} removed")),
            (None, _) => out.push(format!("{what} {name} added")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn text(host: &str, disk: u64) -> String {
        format!(
            "providers:\n- name: home\n  type: kvm2\n  kvm2:\n    sshKeyFile: /k\n    knownHostsFile: /h\n    diskSizeGb: {disk}\n    \
             machineTypes: {{s: {{vcpus: 1, memoryMiB: 1024}}}}\n    hosts: [{{name: {host}, address: hv1, user: u, bridge: br0}}]\n"
        )
    }

    struct Setup {
        dir: tempfile::TempDir,
        watcher: Watcher,
        handle: ConfigHandle,
    }

    impl Setup {
        /// The watcher of a file that it has read once.
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("providers.yaml");
            fs::write(&path, text("hv1", 10)).expect("written");
            let (config, _) = load(&path, []).unwrap_or_else(|report| panic!("{report}"));
            let (mut watcher, handle) = Watcher::new(path, [], config);
            assert!(matches!(watcher.poll_once(), Look::Settling));
            assert!(matches!(watcher.poll_once(), Look::Same));
            assert!(matches!(watcher.poll_once(), Look::Unchanged));
            Self { dir, watcher, handle }
        }

        /// Replaces the file; another inode, so that no clock has to move on.
        fn write(&self, text: &str) {
            let next = self.dir.path().join("next");
            fs::write(&next, text).expect("written");
            fs::rename(next, self.dir.path().join("providers.yaml")).expect("renamed");
        }

        fn settle(&mut self) -> Look {
            assert!(matches!(self.watcher.poll_once(), Look::Settling));
            self.watcher.poll_once()
        }
    }

    #[test]
    fn a_changed_file_replaces_the_configuration_and_wakes_its_users() {
        let mut s = Setup::new();
        let mut waiting = s.handle.clone();
        s.write(&text("hv2", 20));
        let Look::Replaced(changes) = s.settle() else { panic!("not replaced") };
        assert_eq!(changes, ["entry home: host hv1 removed", "entry home: host hv2 added", "entry home: settings changed"]);
        assert_eq!(s.handle.current().entries[0].hosts[0].name, "hv2");
        assert!(waiting.changed().now_or_never().is_some());
        assert!(matches!(s.watcher.poll_once(), Look::Unchanged));
    }

    #[test]
    fn a_broken_file_is_refused_whole_once_and_the_next_good_one_counts() {
        let mut s = Setup::new();
        s.write(&text("hv2", 70_000));
        let Look::Refused(report) = s.settle() else { panic!("not refused") };
        assert!(report.to_string().contains("diskSizeGb"), "{report}");
        assert_eq!(s.handle.current().entries[0].hosts[0].name, "hv1");
        assert!(matches!(s.watcher.poll_once(), Look::Unchanged), "said once");
        s.write(&text("hv2", 10));
        assert!(matches!(s.settle(), Look::Replaced(_)));
        assert_eq!(s.handle.current().entries[0].hosts[0].name, "hv2");
    }

    #[test]
    fn a_missing_file_is_refused_and_its_return_is_seen() {
        let mut s = Setup::new();
        let path = s.dir.path().join("providers.yaml");
        fs::remove_file(&path).expect("removed");
        assert!(matches!(s.settle(), Look::Refused(_)));
        assert!(matches!(s.watcher.poll_once(), Look::Unchanged));
        assert_eq!(s.handle.current().entries.len(), 1);
        s.write(&text("hv1", 10));
        assert!(matches!(s.settle(), Look::Same));
    }

    #[test]
    fn a_file_that_is_still_being_written_is_not_read() {
        let mut s = Setup::new();
        s.write("providers:\n");
        assert!(matches!(s.watcher.poll_once(), Look::Settling));
        s.write(&text("hv2", 10));
        assert!(matches!(s.watcher.poll_once(), Look::Settling));
        assert!(matches!(s.watcher.poll_once(), Look::Replaced(_)));
    }

    #[test]
    fn a_replaced_link_as_of_a_config_map_is_a_change() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        for (version, host) in [("v1", "hv1"), ("v2", "hv2")] {
            fs::create_dir(at(version)).expect("created");
            fs::write(at(version).join("providers.yaml"), text(host, 10)).expect("written");
        }
        symlink("v1", at("..data")).expect("linked");
        symlink("..data/providers.yaml", at("providers.yaml")).expect("linked");
        let path = at("providers.yaml");
        let (config, _) = load(&path, []).unwrap_or_else(|report| panic!("{report}"));
        let (mut watcher, handle) = Watcher::new(path, [], config);
        watcher.poll_once();
        watcher.poll_once();
        symlink("v2", at("..next")).expect("linked");
        fs::rename(at("..next"), at("..data")).expect("renamed");
        assert!(matches!(watcher.poll_once(), Look::Settling));
        assert!(matches!(watcher.poll_once(), Look::Replaced(_)));
        assert_eq!(handle.current().entries[0].hosts[0].name, "hv2");
    }

    #[test]
    fn a_change_between_start_and_first_look_is_not_lost() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("providers.yaml");
        fs::write(&path, text("hv1", 10)).expect("written");
        let (config, _) = load(&path, []).unwrap_or_else(|report| panic!("{report}"));
        fs::write(&path, text("hv2", 10)).expect("written");
        let (mut watcher, handle) = Watcher::new(path, [], config);
        watcher.poll_once();
        assert!(matches!(watcher.poll_once(), Look::Replaced(_)));
        assert_eq!(handle.current().entries[0].hosts[0].name, "hv2");
    }

    #[test]
    fn overrides_stay_over_a_replaced_file() {
        let mut s = Setup::new();
        s.watcher.env = vec![("KVM2_PROVIDERS__HOME__HOSTS__HV2__BRIDGE".into(), "br9".into())];
        s.write(&text("hv2", 10));
        assert!(matches!(s.settle(), Look::Replaced(_)));
        assert_eq!(s.handle.current().entries[0].hosts[0].bridge, "br9");
    }

    #[tokio::test]
    async fn the_task_ends_when_it_is_told_to() {
        let s = Setup::new();
        let stop = CancellationToken::new();
        let (handle, task) = watch(s.dir.path().join("providers.yaml"), [], (*s.handle.current()).clone(), stop.clone());
        stop.cancel();
        task.await;
        assert_eq!(handle.current().entries.len(), 1);
    }
    #[tokio::test(start_paused = true)]
    async fn the_task_replaces_the_configuration_of_its_handle() {
        let s = Setup::new();
        let stop = CancellationToken::new();
        let (mut handle, task) = watch(s.dir.path().join("providers.yaml"), [], (*s.handle.current()).clone(), stop.clone());
        s.write(&text("hv2", 10));
        tokio::select! {
            () = task => panic!("the task ended"),
            () = handle.changed() => {}
        }
        assert_eq!(handle.current().entries[0].hosts[0].name, "hv2");
    }
}
