//! Short commands on the host, where the account allows any: they tell apart what
//! sshd reports in the same words, and see what libvirt does not show.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use russh::ChannelMsg;
use russh::client::Handle;

use super::ssh::Peer;
use crate::error::Reason;
use crate::hypervisor::libvirt::Outlook;

/// A host that answers at all answers a `test` at once.
const PATIENCE: Duration = Duration::from_secs(3);

/// Our scripts print one word; an account that is no shell prints a sentence.
const MAX_OUTPUT: usize = 64;

/// Runs a POSIX script; None unless it ran and printed something short.
async fn run(session: &Handle<Peer>, script: &str) -> Option<String> {
    let command = format!("/bin/sh -c {}", quoted(script));
    let work = async {
        let mut channel = session.channel_open_session().await.ok()?;
        channel.exec(true, command).await.ok()?;
        let (mut output, mut status) = (Vec::new(), None);
        while let Some(message) = channel.wait().await {
            match message {
                ChannelMsg::Data { data } => output.extend(data.iter().take(MAX_OUTPUT - output.len().min(MAX_OUTPUT))),
                ChannelMsg::ExitStatus { exit_status } => status = Some(exit_status),
                ChannelMsg::Failure | ChannelMsg::Close => break,
                _ => {}
            }
        }
        let _ = channel.close().await;
        (status == Some(0)).then(|| String::from_utf8_lossy(&output).trim().to_owned())
    };
    tokio::time::timeout(PATIENCE, work).await.ok().flatten()
}

/// One word for a POSIX shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Why sshd would not connect a channel to the socket at `path`.
pub async fn why_refused(session: &Handle<Peer>, path: &str) -> Reason {
    let socket = quoted(path);
    let directory = quoted(path.rsplit_once('/').map_or(".", |(parent, _)| if parent.is_empty() { "/" } else { parent }));
    let script = format!(
        "if [ -d {directory} ] && [ ! -x {directory} ]; then echo denied; elif [ ! -S {socket} ]; then echo missing; \
         elif [ ! -w {socket} ]; then echo denied; else echo there; fi"
    );
    match run(session, &script).await.as_deref() {
        Some("missing") => Reason::SocketMissing,
        Some("denied") => Reason::SocketDenied,
        // nothing is wrong with it, so sshd does not want to
        Some("there") => Reason::StreamlocalForwardingDisabled,
        _ => Reason::SocketUnavailable,
    }
}

/// The host's network interfaces as its kernel lists them.
pub struct RemoteOutlook(pub Arc<Handle<Peer>>);

impl std::fmt::Debug for RemoteOutlook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RemoteOutlook")
    }
}

#[async_trait]
impl Outlook for RemoteOutlook {
    async fn has_network_interface(&self, name: &str) -> Option<bool> {
        let path = quoted(&format!("/sys/class/net/{name}"));
        // answers only where there is a /sys to look at
        let script = format!("if [ ! -d /sys/class/net/lo ]; then exit 1; elif [ -e {path} ]; then echo yes; else echo no; fi");
        match run(&self.0, &script).await.as_deref() {
            Some("yes") => Some(true),
            Some("no") => Some(false),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_quotes_stays_one_word() {
        assert_eq!(quoted("/run/a b/$(c)'d"), "'/run/a b/$(c)'\\''d'");
    }
}
