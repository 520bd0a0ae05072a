//! Links: host table → SSH session → forwarded socket → libvirt connection.
//!
//! A link is one SSH session with one direct-streamlocal channel, a private unix
//! socket (0700 directory, one accept, then unlinked) and one libvirt connection.
//! Per host there is one shared control link, dialled on first use; transfers and
//! checks get links of their own. A budget overrun, a failed keepalive or a
//! connection-class error kills a link: it is marked dead, its waiters wake, then
//! its transport is dropped, without waiting for the peer.

pub mod credentials;
pub mod dial;
pub mod known_hosts;
pub mod remote;
pub mod ssh;
pub mod state;
pub mod table;
pub mod transport;
pub mod tunnel;

pub use table::HostTable;
