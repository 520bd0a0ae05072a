//! Is a proxy a proxy? A CONNECT through each, on a schedule.
//!
//! ```text
//! reconcile ──want──▶ Board ◀──verdicts── Prober ──CONNECT──▶ proxies
//!     ▲                 │
//!     └──── touch ──────┘   a changed verdict is a reason to reconcile
//! ```

pub mod board;
pub mod probe;
pub mod prober;
pub mod thresholds;

pub use board::Board;
pub use probe::{Finding, ProbeOptions};
pub use prober::{Prober, ProberOptions};
