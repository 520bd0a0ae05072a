//! The built `kvm2-providerd` on a socket of its own.

use std::fmt;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::clients::Clients;
use crate::poll::{eventually, eventually_sync};
use crate::providers_file::ProvidersFile;

/// Path of the program; else the one that cargo built beside the tests.
const BINARY: &str = "KVM2_PROVIDERD";
/// Only ends a test of a daemon that never gets ready.
const READY_LIMIT: Duration = Duration::from_secs(20);
/// What the daemon's log says of the address that it chose.
const SERVING_METRICS: &str = "serving metrics";
/// Above the daemon's own drain time.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Last lines of a log that a failed test shows.
const TAIL: usize = 80;

/// A running daemon. Dropping it kills it; a test that fails shows the end of its log.
pub struct Daemon {
    child: Option<Child>,
    dir: PathBuf,
    config: PathBuf,
    log_level: String,
    program: PathBuf,
    failpoints: String,
    log_format: &'static str,
    variables: Vec<(&'static str, String)>,
}

impl Daemon {
    /// Starts the daemon with its files in `dir` and returns when it serves.
    pub async fn start(dir: &Path, file: &ProvidersFile) -> Self {
        let mut daemon = Self::spawn(dir, file);
        daemon.ready().await;
        daemon
    }

    /// The same, telling as much as it can: what it must not tell has to be absent even then.
    pub async fn start_talkative(dir: &Path, file: &ProvidersFile) -> Self {
        let mut daemon = Self::prepare(dir, file);
        "trace".clone_into(&mut daemon.log_level);
        daemon.run();
        daemon.ready().await;
        daemon
    }

    /// With these levels and this format, and variables of the environment beside those of every test.
    pub async fn start_logging(
        dir: &Path,
        file: &ProvidersFile,
        levels: &str,
        format: &'static str,
        variables: Vec<(&'static str, String)>,
    ) -> Self {
        let mut daemon = Self::prepare(dir, file);
        levels.clone_into(&mut daemon.log_level);
        daemon.log_format = format;
        daemon.variables = variables;
        daemon.run();
        daemon.ready().await;
        daemon
    }

    /// Starts the build with failpoints, these set; [`Daemon::disarm`] sets none for the next start.
    pub async fn start_failing(dir: &Path, file: &ProvidersFile, program: &Path, failpoints: String) -> Self {
        let mut daemon = Self::prepare(dir, file);
        program.clone_into(&mut daemon.program);
        daemon.failpoints = failpoints;
        daemon.run();
        daemon.ready().await;
        daemon
    }

    pub fn disarm(&mut self) {
        self.failpoints.clear();
    }

    /// Starts the daemon and does not wait.
    pub fn spawn(dir: &Path, file: &ProvidersFile) -> Self {
        let mut daemon = Self::prepare(dir, file);
        daemon.run();
        daemon
    }

    /// The same, logging no more than it does by default: for measurements.
    pub fn spawn_terse(dir: &Path, file: &ProvidersFile) -> Self {
        let mut daemon = Self::prepare(dir, file);
        "info".clone_into(&mut daemon.log_level);
        daemon.run();
        daemon
    }

    fn prepare(dir: &Path, file: &ProvidersFile) -> Self {
        Self {
            child: None,
            dir: dir.to_owned(),
            config: file.write(dir),
            log_level: "debug".to_owned(),
            program: binary(),
            failpoints: String::new(),
            log_format: "text",
            variables: Vec::new(),
        }
    }

    fn run(&mut self) {
        let log = File::options().create(true).append(true).open(self.log_path()).expect("opening the daemon's log");
        let mut command = Command::new(&self.program);
        command
            .arg("serve")
            .arg("--config")
            .arg(&self.config)
            .arg("--socket")
            .arg(self.socket())
            .args(["--metrics", "127.0.0.1:0", "--log-level", &self.log_level, "--log-format", self.log_format])
            // KVM2_* of the test run would be taken for overrides of the configuration
            .env_clear()
            .envs(["PATH", "HOME"].iter().filter_map(|key| Some((*key, std::env::var_os(key)?))))
            .env("TMPDIR", &self.dir)
            // read by the build with failpoints only
            .env("FAILPOINTS", &self.failpoints)
            .env("RUST_BACKTRACE", "1")
            .envs(self.variables.iter().map(|(name, value)| (*name, value.as_str())))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle of the log"))
            .stderr(log);
        let child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        self.child = Some(child);
    }

    /// Waits until the daemon says that it serves.
    pub async fn ready(&mut self) {
        let clients = self.clients();
        let start = std::time::Instant::now();
        loop {
            if let Some(status) = self.exited() {
                panic!("the daemon ended with {status} instead of serving:\n{}", self.log_tail());
            }
            let answer = clients.health.clone().check(HealthCheckRequest::default()).await;
            match answer {
                Ok(answer) if answer.get_ref().status() == ServingStatus::Serving => return,
                _ if start.elapsed() > READY_LIMIT => panic!("the daemon does not serve: {answer:?}\n{}", self.log_tail()),
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// New clients: each test has to make them on its own runtime.
    pub fn clients(&self) -> Clients {
        Clients::on(&self.socket())
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("d.sock")
    }

    pub fn config_path(&self) -> &Path {
        &self.config
    }

    pub fn log_path(&self) -> PathBuf {
        self.dir.join("daemon.log")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(TAIL)..].join("\n")
    }

    pub fn pid(&self) -> i32 {
        let child = self.child.as_ref().expect("the daemon runs");
        i32::try_from(child.id()).expect("a pid fits")
    }

    /// Where it serves its metrics, as its log says.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        let log = self.log();
        let line = log.lines().rev().find(|line| line.contains(SERVING_METRICS))?;
        // in a line of text or of JSON
        line.split_once("address")?.1.trim_start_matches(['=', ':', '"']).split('"').next()?.parse().ok()
    }

    /// Some once the process has ended by itself.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.try_wait().expect("waiting for a child")
    }

    /// Waits for an end of its own; an error tells that it goes on.
    pub async fn ends(&mut self, limit: Duration) -> Result<ExitStatus, String> {
        let start = std::time::Instant::now();
        loop {
            match self.exited() {
                Some(status) => {
                    self.child = None;
                    return Ok(status);
                }
                None if start.elapsed() > limit => return Err(format!("the daemon runs after {limit:?}")),
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// SIGKILL: the daemon gets no chance to tidy up.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // fails only for a child that has ended
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("signalling a child");
    }

    /// SIGTERM, and the exit status once it has drained.
    pub async fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        let status =
            eventually_sync("the daemon ends after SIGTERM", STOP_LIMIT, || self.exited().ok_or_else(|| "it runs".to_owned())).await;
        self.child = None;
        status
    }

    /// Starts it again with the same files after [`Daemon::kill`] or [`Daemon::stop`].
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "stop it first");
        self.run();
        self.ready().await;
    }

    /// Replaces the providers file of the running daemon, and waits until it has been taken over or refused.
    pub async fn reconfigure(&self, file: &ProvidersFile, said: &str) {
        let before = self.log().len();
        file.write(&self.dir);
        eventually("the daemon looks at its new file", Duration::from_secs(20), || async {
            let log = self.log();
            let new = &log[before.min(log.len())..];
            if new.contains(said) { Ok(()) } else { Err(format!("no {said:?} in the log: {new}")) }
        })
        .await;
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- end of {} ---\n{}\n---", self.log_path().display(), self.log_tail());
        }
    }
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Daemon").field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// The program under test.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os(BINARY) {
        return path.into();
    }
    // target/debug/deps/<test> → target/debug/kvm2-providerd
    let test = std::env::current_exe().expect("a test knows its own path");
    let path = test.ancestors().nth(2).expect("a test lies in target/<profile>/deps").join("kvm2-providerd");
    assert!(path.exists(), "{} is not built: cargo build -p provider-kvm2, or set {BINARY}", path.display());
    path
}
