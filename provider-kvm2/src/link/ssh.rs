//! The SSH session: algorithms, host key, user key; and a name for what went wrong.

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use russh::client::{self, AuthResult, DisconnectReason, Handle};
use russh::keys::{HashAlg, PrivateKey, PrivateKeyWithHashAlg, PublicKeyOrCertificate};
use russh::{AlgorithmKind, MethodKind, Preferred, cipher};

use super::known_hosts::{KnownHosts, Verdict, algorithms};
use super::state::{KEEPALIVE, LINGER, LinkState, SILENCE};
use super::transport::Transport;
use crate::error::{ProviderError, Reason, Result, bounded};

/// AES-GCM first: with hardware AES it more than halves the time of an upload.
const CIPHERS: &[cipher::Name] =
    &[cipher::AES_128_GCM, cipher::AES_256_GCM, cipher::CHACHA20_POLY1305, cipher::AES_256_CTR, cipher::AES_192_CTR, cipher::AES_128_CTR];

/// Whom to expect at the other end.
#[derive(Debug, Clone)]
pub enum HostCheck {
    Ignored,
    Known(Arc<KnownHosts>),
}

/// The client's side of a session, as russh calls it.
#[derive(Debug)]
pub struct Peer {
    state: Arc<LinkState>,
    check: HostCheck,
    host: String,
    port: u16,
    verdict: Arc<OnceLock<(Verdict, String)>>,
}

impl client::Handler for Peer {
    type Error = russh::Error;

    async fn check_server_key(&mut self, presented: &PublicKeyOrCertificate) -> Result<bool, russh::Error> {
        let HostCheck::Known(known) = &self.check else { return Ok(true) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let verdict = known.check(&self.host, self.port, presented, now);
        let trusted = verdict == Verdict::Trusted;
        let key = presented.public_key();
        let shown = format!("{} {}", key.algorithm(), key.fingerprint(HashAlg::Sha256));
        // one key exchange per session decides; a later one shows the same key or is refused here
        let _ = self.verdict.set((verdict, shown));
        Ok(trusted)
    }

    async fn disconnected(&mut self, reason: DisconnectReason<russh::Error>) -> Result<(), russh::Error> {
        match reason {
            DisconnectReason::ReceivedDisconnect(info) => {
                self.state.kill(&format!("sshd ended the session: {}", bounded(&info.message)));
                Ok(())
            }
            DisconnectReason::Error(e) => {
                self.state.kill(&format!("the SSH session broke: {e}"));
                Err(e)
            }
        }
    }
}

/// Where a session goes to, and the names for its errors.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// The configured name of the host.
    pub name: &'a str,
    pub address: &'a str,
    pub port: u16,
    pub user: &'a str,
}

fn config(check: &HostCheck, target: Target<'_>) -> client::Config {
    let (keys, certificates) = match check {
        HostCheck::Ignored => (algorithms(), Vec::new()),
        HostCheck::Known(known) => {
            let wanted = known.wanted(target.address, target.port);
            (wanted.keys, wanted.certificates)
        }
    };
    client::Config {
        preferred: Preferred { key: keys.into(), host_key_certificates: certificates.into(), cipher: CIPHERS.into(), ..Preferred::DEFAULT },
        keepalive_interval: Some(KEEPALIVE),
        // silence is judged by bytes that arrive, in a task that a stalled write does not hold up
        keepalive_max: 0,
        // it only ends what nothing else did, and not before a link that lingers
        inactivity_timeout: Some(SILENCE + LINGER),
        nodelay: true,
        ..client::Config::default()
    }
}

/// Handshake and authentication over a connection that stands.
pub async fn open(
    transport: Transport,
    state: &Arc<LinkState>,
    check: HostCheck,
    key: Arc<PrivateKey>,
    target: Target<'_>,
) -> Result<Handle<Peer>> {
    state.stage("SSH handshake");
    let verdict = Arc::new(OnceLock::new());
    let config = Arc::new(config(&check, target));
    let peer = Peer { state: state.clone(), check, host: target.address.to_owned(), port: target.port, verdict: verdict.clone() };
    let mut session = client::connect_stream(config, transport, peer).await.map_err(|e| match verdict.get() {
        Some((verdict, shown)) if *verdict != Verdict::Trusted => host_key_error(target, verdict, shown),
        // sshd lets a connection go that it has no place for, before or during the key exchange
        _ => handshake_error(target, e),
    })?;

    state.stage("SSH authentication");
    let hash = match key.algorithm().is_rsa() {
        false => None,
        // a server that does not say, or names only SHA-1, is still asked for SHA-2
        true => Some(session.best_supported_rsa_hash().await.ok().flatten().flatten().unwrap_or(HashAlg::Sha512)),
    };
    let key = PrivateKeyWithHashAlg::new(key, hash);
    match session.authenticate_publickey(target.user, key).await {
        Ok(AuthResult::Success) => Ok(session),
        Ok(AuthResult::Failure { .. }) if session.is_closed() || state.is_dead() => {
            Err(unreachable(target, "the host ended the connection during authentication"))
        }
        Ok(AuthResult::Failure { remaining_methods, partial_success }) => Err(auth_error(target, &remaining_methods, partial_success)),
        Err(e) => Err(unreachable(target, "the connection broke during authentication").with_source(e)),
    }
}

pub fn unreachable(target: Target<'_>, what: &str) -> ProviderError {
    let message = format!("host {} is unreachable at {}:{}: {what}", target.name, target.address, target.port);
    ProviderError::new(Reason::HostUnreachable, message).on_host(target.name)
}

fn auth_error(target: Target<'_>, methods: &[MethodKind], partial: bool) -> ProviderError {
    let message = if partial {
        format!("sshd on host {} takes the key of user {} but asks for another factor; allow publickey alone", target.name, target.user)
    } else {
        format!("sshd on host {} refuses the key for user {}; add its public half to authorized_keys there", target.name, target.user)
    };
    let offered = methods.iter().map(<&str>::from).collect::<Vec<_>>().join(",");
    ProviderError::new(Reason::SshAuthRejected, message).on_host(target.name).with_meta("methods", offered)
}

fn host_key_error(target: Target<'_>, verdict: &Verdict, shown: &str) -> ProviderError {
    let name = target.name;
    let (reason, message) = match verdict {
        Verdict::Unknown | Verdict::Trusted => {
            (Reason::HostKeyUnknown, format!("known_hosts has no key of host {name}, which shows {shown}; verify and add it"))
        }
        Verdict::Changed => (
            Reason::HostKeyChanged,
            format!("host {name} shows another key ({shown}) than known_hosts has; somebody may listen, so verify before you replace it"),
        ),
        Verdict::Revoked => {
            (Reason::HostKeyRevoked, format!("the key of host {name} ({shown}) is revoked in known_hosts; give the host a new one"))
        }
        Verdict::BadCertificate(fault) => (
            Reason::HostKeyUnknown,
            format!("the host certificate of {name} is not accepted: {fault}; renew it or add the host's key to known_hosts"),
        ),
    };
    ProviderError::new(reason, message).on_host(name)
}

fn handshake_error(target: Target<'_>, error: russh::Error) -> ProviderError {
    use russh::Error as E;
    let name = target.name;
    let (reason, message) = match &error {
        E::NoCommonAlgo { kind: AlgorithmKind::Key, .. } => (
            Reason::HostIncompatible,
            format!("host {name} has no host key of a type that is accepted; give it an ed25519, ECDSA or RSA (SHA-2) key"),
        ),
        E::NoCommonAlgo { .. } | E::UnknownAlgo => {
            (Reason::HostIncompatible, format!("host {name} shares no SSH algorithm with this provider; bring its sshd up to date"))
        }
        E::Version | E::PacketSize(_) | E::Utf8(_) => (
            Reason::HostIncompatible,
            format!("what listens at {}:{} is no SSH server; check the address of host {name}", target.address, target.port),
        ),
        // before authentication sshd closes for one reason above all
        E::Disconnect | E::HUP | E::IO(_) | E::SendError | E::RecvError => (
            Reason::SshThrottled,
            format!(
                "sshd on host {name} closed the connection before authentication; see MaxStartups and PerSourcePenalties in its sshd_config"
            ),
        ),
        _ => (Reason::HostUnreachable, format!("the SSH handshake with host {name} failed; try again later")),
    };
    ProviderError::new(reason, message).on_host(name).with_source(error)
}
