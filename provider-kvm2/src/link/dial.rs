//! Dials one link: TCP, SSH, socket channel, libvirt, all within the dial budget.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use russh::client::Handle;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::credentials::Credentials;
use super::remote;
use super::ssh::{self, HostCheck, Peer, Target};
use super::state::{LinkKind, LinkState, SILENCE, watch};
use super::transport::Transport;
use super::tunnel::{Door, carry};
use crate::config::HostKeys;
use crate::error::{LibvirtCode, ProviderError, Reason, Result};
use crate::hypervisor::libvirt::{Connection, LibvirtError, LibvirtHypervisor, Outlook};
use crate::hypervisor::{Budgets, HostId, classify, code};
use crate::telemetry::metrics::Metrics;

/// First pause after sshd had no place for a connection; doubled each time.
const THROTTLE_PAUSE: Duration = Duration::from_millis(200);

/// The stage in which SSH has done its part and the libvirt daemon has to answer.
const OPENING_LIBVIRT: &str = "opening libvirt";

/// All that decides where a link leads; another endpoint is another link.
#[derive(Debug, Clone, PartialEq)]
pub struct Endpoint {
    pub id: HostId,
    pub address: String,
    pub port: u16,
    pub user: String,
    pub socket: String,
    pub key_file: PathBuf,
    pub host_keys: HostKeys,
    pub budgets: Budgets,
}

impl Endpoint {
    fn target(&self) -> Target<'_> {
        Target { name: &self.id.host, address: &self.address, port: self.port, user: &self.user }
    }
}

/// What all dials of a table share.
#[derive(Clone)]
pub struct Dialler {
    pub credentials: Credentials,
    pub metrics: Metrics,
    pub tracker: TaskTracker,
    pub closing: CancellationToken,
}

impl fmt::Debug for Dialler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dialler")
    }
}

impl Dialler {
    /// Dials until the link stands or the budget is spent; sshd's throttling is waited out within it.
    #[tracing::instrument(name = "kvm2.dial", skip_all, fields(kvm2.host = %endpoint.id.host, address = %endpoint.address, user = %endpoint.user))]
    pub async fn dial(&self, endpoint: &Endpoint, kind: LinkKind, deadline: Instant) -> Result<LibvirtHypervisor> {
        let began = Instant::now();
        let mut pause = THROTTLE_PAUSE;
        let result = loop {
            let state = LinkState::new(&endpoint.id.host, kind, self.metrics.clone());
            let _attempt = Attempt(state.clone());
            let attempt = tokio::select! {
                attempt = timeout_at(deadline, self.attempt(endpoint, &state)) => attempt,
                () = self.closing.cancelled() => Ok(Err(ProviderError::new(Reason::ShuttingDown, "the daemon is shutting down"))),
            };
            let error = match attempt {
                Ok(Ok(link)) => return Ok(link),
                Ok(Err(e)) => e,
                Err(_) => no_answer(endpoint, state.current_stage(), began.elapsed()),
            };
            if error.reason() != Reason::SshThrottled || Instant::now() + pause >= deadline {
                break Err(error);
            }
            tokio::time::sleep(jittered(pause)).await;
            pause *= 2;
        };
        self.metrics.link(&endpoint.id.host, kind.label(), "dial_failed");
        result
    }

    async fn attempt(&self, endpoint: &Endpoint, state: &Arc<LinkState>) -> Result<LibvirtHypervisor> {
        let started = Instant::now();
        let (key, check) = self.credentials(endpoint).await?;
        let target = endpoint.target();
        let stream = connect(target).await?;
        let transport =
            Transport::new(stream, state.clone()).map_err(|e| ssh::unreachable(target, "the connection broke").with_source(e))?;
        let session = Arc::new(ssh::open(transport, state, check, key, target).await?);

        state.stage("opening the libvirt socket");
        let channel = match session.channel_open_direct_streamlocal(&endpoint.socket).await {
            Ok(channel) => channel,
            Err(e) => return Err(socket_error(endpoint, &session, e).await),
        };
        let door = Door::open().map_err(|e| {
            ProviderError::new(Reason::Internal, "the local socket for libvirt cannot be made; check the temporary directory")
                .with_source(e)
        })?;

        state.stage(OPENING_LIBVIRT);
        let uri = door.uri();
        self.tracker.spawn(carry(door, channel, state.clone(), self.closing.clone()));
        let link = self.open(endpoint, state, uri, Arc::new(remote::RemoteOutlook(session))).await?;
        tracing::debug!(host = %endpoint.id.host, kind = state.kind().label(), ms = started.elapsed().as_millis(), "link dialled");
        Ok(link)
    }

    /// The last step of a dial: libvirt's handshake through the door of `uri`, whoever carries its bytes.
    pub async fn open(
        &self,
        endpoint: &Endpoint,
        state: &Arc<LinkState>,
        uri: String,
        outlook: Arc<dyn Outlook>,
    ) -> Result<LibvirtHypervisor> {
        self.tracker.spawn(watch(state.clone(), SILENCE, self.closing.clone()));
        let tracker = self.tracker.clone();
        let opened = self.tracker.spawn_blocking(move || Connection::open(&uri, tracker)).await;
        let connection = match opened {
            Ok(Ok(connection)) => connection,
            Ok(Err(e)) => return Err(open_error(endpoint, state, e)),
            Err(e) => return Err(ProviderError::new(Reason::Internal, "opening libvirt was cut short").with_source(e)),
        };
        if !state.opened() {
            let broken = ssh::unreachable(endpoint.target(), "the link broke as it was made");
            return Err(broken.with_source(std::io::Error::other(state.cause())));
        }
        Ok(LibvirtHypervisor::new(connection, state.clone(), endpoint.budgets, self.tracker.clone(), outlook))
    }

    async fn credentials(&self, endpoint: &Endpoint) -> Result<(Arc<russh::keys::PrivateKey>, HostCheck)> {
        let credentials = self.credentials.clone();
        let (key_file, host_keys) = (endpoint.key_file.clone(), endpoint.host_keys.clone());
        let read = self.tracker.spawn_blocking(move || {
            let key = credentials.key(&key_file)?;
            let check = match host_keys {
                HostKeys::Ignored => HostCheck::Ignored,
                HostKeys::KnownHosts(path) => HostCheck::Known(credentials.known_hosts(&path)?),
            };
            Ok((key, check))
        });
        match read.await {
            Ok(result) => result.map_err(|e: ProviderError| e.on_host(&endpoint.id.host)),
            Err(e) => Err(ProviderError::new(Reason::Internal, "reading the credentials was cut short").with_source(e)),
        }
    }
}

/// Ends a link that did not come to stand, also when the dial is dropped half way.
struct Attempt(Arc<LinkState>);

impl Drop for Attempt {
    fn drop(&mut self) {
        if !self.0.is_open() {
            self.0.kill("the dial failed");
        }
    }
}

fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + rand::random::<f64>())
}

/// Tries each address of the name; one that is silent leaves the others their share of the time.
async fn connect(target: Target<'_>) -> Result<TcpStream> {
    const PER_ADDRESS: Duration = Duration::from_secs(3);
    let resolved = tokio::net::lookup_host((target.address, target.port)).await;
    let addresses: Vec<_> = resolved.map_err(|e| ssh::unreachable(target, "its name cannot be resolved").with_source(e))?.collect();
    let mut failure = ssh::unreachable(target, "its name has no address");
    for (i, address) in addresses.iter().enumerate() {
        let last = i + 1 == addresses.len();
        let attempt = TcpStream::connect(address);
        let result = if last {
            attempt.await
        } else {
            tokio::time::timeout(PER_ADDRESS, attempt).await.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
        };
        match result {
            Ok(stream) => return Ok(stream),
            Err(e) => failure = ssh::unreachable(target, "the connection is refused or gets no answer").with_source(e),
        }
    }
    Err(failure)
}

/// Tells a host that cannot be reached from one whose libvirt daemon hangs behind a sound sshd.
fn no_answer(endpoint: &Endpoint, stage: &'static str, waited: Duration) -> ProviderError {
    let error = if stage == OPENING_LIBVIRT {
        let message = format!(
            "libvirtd on host {} took the connection and did not answer within {} ms; if that stays so, restart it: guests go on running",
            endpoint.id.host,
            waited.as_millis()
        );
        ProviderError::new(Reason::CallTimeout, message).on_host(&endpoint.id.host).during("open").with_meta("step", "open")
    } else {
        ssh::unreachable(endpoint.target(), &format!("no answer within {} ms ({stage})", waited.as_millis()))
    };
    error.with_meta("stage", stage)
}

async fn socket_error(endpoint: &Endpoint, session: &Handle<Peer>, error: russh::Error) -> ProviderError {
    use russh::{ChannelOpenFailure as F, Error as E};
    let (host, user, socket) = (&endpoint.id.host, &endpoint.user, &endpoint.socket);
    let reason = match &error {
        E::ChannelOpenFailure(F::ResourceShortage) => Reason::SshThrottled,
        E::ChannelOpenFailure(F::AdministrativelyProhibited | F::UnknownChannelType) => Reason::StreamlocalForwardingDisabled,
        // one answer for three causes
        E::ChannelOpenFailure(_) => remote::why_refused(session, socket).await,
        _ => return ssh::unreachable(endpoint.target(), "the connection broke while the libvirt socket was opened").with_source(error),
    };
    let message = match reason {
        Reason::SshThrottled => format!("sshd on host {host} has no room for another channel; see MaxSessions in its sshd_config"),
        Reason::SocketMissing => format!("host {host} has no libvirt socket {socket}; start libvirtd there or correct `socket`"),
        Reason::SocketDenied => format!("user {user} may not use the libvirt socket {socket} on host {host}; add the user to its group"),
        Reason::StreamlocalForwardingDisabled => {
            format!(
                "sshd on host {host} does not forward to {socket}; set AllowStreamLocalForwarding yes and AllowTcpForwarding local (and DisableForwarding no) for {user}"
            )
        }
        _ => format!(
            "the libvirt socket {socket} on host {host} cannot be opened: start libvirtd or correct `socket`, let user {user} use it, \
             or set AllowStreamLocalForwarding yes and AllowTcpForwarding local in sshd_config"
        ),
    };
    ProviderError::new(reason, message).on_host(host).with_source(error)
}

fn open_error(endpoint: &Endpoint, state: &LinkState, error: LibvirtError) -> ProviderError {
    let host = &endpoint.id.host;
    let libvirt = LibvirtCode { code: error.code, domain: error.domain };
    let known = classify::reason_of("open", error.code, error.domain, &error.message);
    let reason = match (error.code, known) {
        // frames that no libvirt sends
        (code::RPC, _) => Reason::HostIncompatible,
        _ if error.is_lost_connection() => Reason::LibvirtRestarting,
        (_, None | Some(Reason::LibvirtError)) if state.is_dead() => Reason::LibvirtRestarting,
        (_, known) => known.unwrap_or(Reason::LibvirtError),
    };
    let message = match reason {
        Reason::LibvirtRestarting => format!("libvirtd on host {host} closed the connection; it may be starting or stopping"),
        Reason::SocketDenied => {
            format!("libvirtd on host {host} refuses user {}; set auth_unix_rw = \"none\" or allow the user in polkit", endpoint.user)
        }
        Reason::HostIncompatible => format!("what listens at {} on host {host} is no libvirt; correct `socket`", endpoint.socket),
        _ => format!("libvirt on host {host} cannot be opened; see its log"),
    };
    let source = std::io::Error::other(error.message);
    ProviderError::new(reason, message).on_host(host).during("open").with_libvirt(libvirt).with_source(source)
}
