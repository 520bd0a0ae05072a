//! A soak: callers that do everything the contract offers, on hosts that break all the time, against a model of what
//! must exist there. The program is `tests/src/bin/soak.rs`, run by `tests/soak`.
//!
//! ```text
//! seed → plan ─┬→ callers ─→ daemons ─→ proxies ─→ hosts
//!              │     ↓ answers                       ↑
//!              │  belief (what may be there)         │
//!              └→ breakers ──→ weather (what is broken when)
//! journal: every step and how it ended; a file of it is a replay
//! end: faults off, everything deleted, audit of the hosts, counters → report
//! ```
//!
//! The plan of each actor is a pure function of the seed. What meets what is not: that is decided by the machine's
//! timing, so a replay keeps the order in which steps began and no more.

pub mod answer;
pub mod audit;
pub mod belief;
pub mod breaker;
pub mod caller;
pub mod course;
pub mod dice;
pub mod journal;
pub mod plan;
pub mod reasons;
pub mod report;
pub mod run;
pub mod weather;

pub use run::{Options, run};
