//! The daemon against real hosts.
//!
//! One program, so that what mostly waits (a guest that boots, a silent host that has to be
//! given up) goes on beside what mostly works. Each module keeps to hosts of its own:
//! `lifecycle` to hv1, `storage`, `images` and `killed` to hv2, `faults` breaks hv3.

mod faults;
mod images;
mod killed;
mod lifecycle;
mod slow;
mod storage;
