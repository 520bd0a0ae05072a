//! Logs, spans and metrics. Nothing secret passes here.

pub mod logs;
pub mod metrics;
pub mod probe;
