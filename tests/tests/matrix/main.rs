//! Matrices of faults against the lab: each place crossed with each thing that can happen there.
//!
//! `tests/run` tries some points that stand for the others, `tests/matrix` all of them; each module ends with a line per
//! try in the summary. `crash` and `pair` kill daemons, for which libvirtd may lock itself up, and keep to hv3, as `cross` does; whatever
//! breaks a host keeps to hv1 and takes its turn; the rest is on hv2.

mod bystander;
mod cancel;
mod crash;
mod cross;
mod handshake;
mod hosts;
mod limits;
mod lockup;
mod lost;
mod pair;
mod places;
mod silent;
mod stop;
mod support;
mod uploads;

use std::path::Path;

use lab_tests::{daemon, failpoints};

fn knows(program: &Path, name: &str) -> bool {
    let bytes = std::fs::read(program).expect("a program");
    // most of a program is not worth a second look
    let first = name.as_bytes()[0];
    bytes.windows(name.len()).any(|part| part[0] == first && part == name.as_bytes())
}

#[test]
fn the_ordinary_program_does_not_know_the_failpoints() {
    let Some(with) = failpoints::binary("the_ordinary_program_does_not_know_the_failpoints") else { return };
    let ordinary = daemon::binary();
    for name in ["create.after_define", "delete.after_mark", "publish.in_body", "failpoint reached", "FAILPOINTS"] {
        assert!(knows(&with, name), "{name} is not in {}", with.display());
        assert!(!knows(&ordinary, name), "{name} is in {}", ordinary.display());
    }
}
