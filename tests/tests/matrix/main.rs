//! Matrices of faults against the lab: each place crossed with each thing that can happen there.
//!
//! `tests/run` tries some points that stand for the others, `tests/matrix` all of them; each module ends with a line per
//! try in the summary. `crash` and `cancel` keep to hv2, whatever breaks a host to hv1 and takes its turn.

mod cancel;
mod crash;
mod limits;
mod silent;
mod support;
