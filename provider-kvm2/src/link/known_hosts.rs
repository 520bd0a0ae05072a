//! known_hosts
